import json
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.teacher.model_facts import read_model_facts

from tests.fakes.scoring_server import POSITIONS, VOCABULARY, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_facts_are_those_of_the_files(model: Path) -> None:
    facts = read_model_facts(model)
    assert (facts.vocabulary_size, facts.max_positions) == (VOCABULARY, POSITIONS)
    assert facts.architectures == ("Fake",)
    assert str(facts.tokens.token(VOCABULARY - 1)) == "special '<end>'"


def test_a_directory_without_a_tokenizer_is_refused_naming_the_file(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadConfiguration, match=r"tokenizer\.json.*ATOLL_TEACHER_MODEL_PATH"):
        read_model_facts(model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", {"model": {}}, r"tokenizer\.json: not a tokenizer\.json: KeyError 'vocab'"),
        ("config.json", {"vocab_size": 0, "max_position_embeddings": 8}, "vocab_size is 0, expected a whole number"),
        ("config.json", [], "holds a list, expected an object"),
    ],
)
def test_a_file_that_says_something_else_is_refused(model: Path, name: str, content: object, message: str) -> None:
    (model / name).write_text(json.dumps(content))
    with pytest.raises(BadConfiguration, match=message):
        read_model_facts(model)
