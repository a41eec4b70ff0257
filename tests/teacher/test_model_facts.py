import json
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.teacher.model_facts import read_model_facts, tokenizer_digest
from pydantic import JsonValue

TOKENIZER: dict[str, JsonValue] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [{"id": 3, "content": "<end>", "special": True, "lstrip": False}],
    "pre_tokenizer": None,
}


def changed(**parts: JsonValue) -> dict[str, JsonValue]:
    return {**json.loads(json.dumps(TOKENIZER)), **parts}


def test_the_digest_does_not_depend_on_spelling_or_order() -> None:
    other = changed(model={"merges": [["a", "b"]], "vocab": {"ab": 2, "b": 1, "a": 0}, "type": "BPE"})
    assert tokenizer_digest(other) == tokenizer_digest(TOKENIZER)


@pytest.mark.parametrize(
    "other",
    [
        changed(model={"type": "BPE", "vocab": {"a": 0, "b": 2, "ab": 1}, "merges": ["a b"]}),
        changed(model={"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []}),
        changed(added_tokens=[{"id": 3, "content": "<stop>", "special": True}]),
    ],
    ids=["an id", "a merge", "a special token"],
)
def test_the_digest_changes_with_whatever_maps_text_to_ids(other: dict[str, JsonValue]) -> None:
    assert tokenizer_digest(other) != tokenizer_digest(TOKENIZER)


def test_a_directory_without_a_tokenizer_is_refused_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4, "max_position_embeddings": 8}))
    with pytest.raises(BadConfiguration, match=r"tokenizer\.json.*ATOLL_TEACHER_MODEL_PATH"):
        read_model_facts(tmp_path)


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 4, "max_position_embeddings": 8}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    facts = read_model_facts(tmp_path)
    assert (facts.vocabulary_size, facts.max_positions) == (4, 8)
    assert facts.tokenizer_digest == tokenizer_digest(TOKENIZER)
