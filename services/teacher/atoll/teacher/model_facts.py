"""What the teacher's model directory says about itself, read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.common.token_map import TokenMap
from pydantic import JsonValue

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Example: ModelFacts(Path("/models/t"), 49152, 8192, ("LlamaForCausalLM",), TokenMap.from_tokenizer_json(...))."""

    directory: Path
    vocabulary_size: int
    """V; ids are 0..V-1."""
    max_positions: int
    """Longest sequence that the model was made for."""
    architectures: tuple[str, ...]
    """Class names; empty when the directory names none."""
    tokens: TokenMap


def read_model_facts(directory: Path) -> ModelFacts:
    """Raises BadConfiguration naming the file that is missing or says something else than expected."""
    config = read_config(directory)
    try:
        tokens = TokenMap.from_tokenizer_json(_read(directory / TOKENIZER))
    except InvalidInput as error:
        raise BadConfiguration(f"{directory / TOKENIZER}: {error.message}") from None
    architectures = config.get("architectures") or []
    return ModelFacts(
        directory=directory,
        vocabulary_size=_positive(config, "vocab_size", directory),
        max_positions=_positive(config, "max_position_embeddings", directory),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        tokens=tokens,
    )


def read_config(directory: Path) -> dict[str, JsonValue]:
    """The model's config.json. Raises BadConfiguration as `read_model_facts` does."""
    path = directory / CONFIG
    try:
        document = json.loads(_read(path))
    except ValueError as error:
        raise BadConfiguration(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} holds a {type(document).__name__}, expected an object")
    return document


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadConfiguration(
            f"the teacher needs {path} to know the model's vocabulary and tokenizer: {error}; set "
            "ATOLL_TEACHER_MODEL_PATH to the directory of the model that the engines serve"
        ) from None


def _positive(config: dict[str, JsonValue], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadConfiguration(f"{directory / CONFIG}: {name} is {value!r}, expected a whole number of at least 1")
    return value
