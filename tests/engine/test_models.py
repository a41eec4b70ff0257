"""Small models made on the spot."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from atoll.engine.models import Architecture, make_tiny
from atoll.engine.models.atomic_dir import ModelDirectoryError, build_once

from tests.forward import all_log_probs


def digests(directory: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_equal_seeds_give_equal_files_and_other_seeds_other_weights_with_the_same_tokenizer(tmp_path: Path) -> None:
    first = digests(make_tiny(tmp_path / "a", seed=1))
    assert first == digests(make_tiny(tmp_path / "b", seed=1))
    other = digests(make_tiny(tmp_path / "c", seed=2))
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


@pytest.mark.parametrize("architecture", list(Architecture))
def test_every_architecture_loads_and_predicts(tmp_path: Path, architecture: Architecture) -> None:
    model = make_tiny(tmp_path / architecture, seed=1, architecture=architecture)
    config = json.loads((model / "config.json").read_text())
    assert config["model_type"] == architecture
    assert config["vocab_size"] == 1024
    table = all_log_probs(model, [1, 2, 3], [4, 5], 1.0)
    assert table.shape == (2, 1024)
    # Far from uniform, or tests of log-probs would compare constants.
    assert table.max() - table.min() > 5


def test_the_tokenizer_round_trips_any_text_and_knows_chat(tiny_models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models / "student")
    assert len(tokenizer) == 1024
    text = "Grüße, 世界 🌊\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]


def test_the_chat_template_shows_tools_and_tool_calls(tiny_models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models / "student")
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "id": "1", "function": {"name": "clock", "arguments": {}}}
    chat = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False)
    assert rendered.startswith("<|im_start|>system\nTools:\n{")
    assert '<tool_call>{"name": "clock", "arguments": {}}</tool_call><|im_end|>\n' in rendered
    assert rendered.endswith("<|im_start|>tool\nnoon<|im_end|>\n")


def test_a_complete_model_is_reused_and_another_one_is_refused(tmp_path: Path) -> None:
    out = make_tiny(tmp_path / "model", seed=1)
    before = (out / "model.safetensors").stat().st_mtime_ns
    make_tiny(out, seed=1)
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ModelDirectoryError, match='"seed": 2'):
        make_tiny(out, seed=2)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelDirectoryError, match="no recipe file"):
        make_tiny(tmp_path / "mine", seed=1)


def test_a_failed_build_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "config.json").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "model", "{}", build)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_the_command_prints_the_directory_and_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll.engine.models", "tiny", "--out", str(tmp_path / "model"), "--seed"]
    made = subprocess.run([*command, "1"], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(tmp_path / "model")
    refused = subprocess.run([*command, "2"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
