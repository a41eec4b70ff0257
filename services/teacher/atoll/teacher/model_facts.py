"""What the teacher's model directory says about itself, read without torch."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from atoll.common.errors import BadConfiguration
from pydantic import JsonValue

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ModelFacts:
    """Example: ModelFacts(vocabulary_size=49152, max_positions=8192, tokenizer_digest="9f86d0...")."""

    vocabulary_size: int
    """V; ids are 0..V-1."""
    max_positions: int
    """Longest sequence that the model was made for."""
    tokenizer_digest: str


def read_model_facts(directory: Path) -> ModelFacts:
    """Raises BadConfiguration naming the file that is missing or says something else than expected."""
    config = _read_object(directory / CONFIG)
    return ModelFacts(
        vocabulary_size=_positive(config, "vocab_size", directory),
        max_positions=_positive(config, "max_position_embeddings", directory),
        tokenizer_digest=tokenizer_digest(_read_object(directory / TOKENIZER)),
    )


def tokenizer_digest(tokenizer: dict[str, JsonValue]) -> str:
    """SHA-256, in hex, of what maps text to ids: vocabulary, merges and added tokens of a tokenizer.json.

    It is taken over canonical JSON, so that the order of the file and the two spellings of a merge ("a b" and
    ["a", "b"]) do not matter.
    """
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    merges = model.get("merges") or []
    added = tokenizer.get("added_tokens") or []
    document = {
        "type": model.get("type"),
        "vocab": model.get("vocab"),
        "merges": [_merge(merge) for merge in merges] if isinstance(merges, list) else merges,
        "added_tokens": [_added(token) for token in added] if isinstance(added, list) else added,
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _merge(merge: JsonValue) -> JsonValue:
    return [*merge.split(" ")] if isinstance(merge, str) else merge


def _added(token: JsonValue) -> JsonValue:
    if not isinstance(token, dict):
        return token
    return {name: token.get(name) for name in ("id", "content", "special")}


def _read_object(path: Path) -> dict[str, JsonValue]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadConfiguration(
            f"the teacher needs {path} to know the model's vocabulary and tokenizer: {error}; set "
            "ATOLL_TEACHER_MODEL_PATH to the directory of the model that the engine serves"
        ) from None
    if not isinstance(document, dict):
        raise BadConfiguration(f"{path} holds a {type(document).__name__}, expected an object")
    return document


def _positive(config: dict[str, JsonValue], name: str, directory: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadConfiguration(f"{directory / CONFIG}: {name} is {value!r}, expected a whole number of at least 1")
    return value
