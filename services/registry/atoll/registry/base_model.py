"""Copies what an engine needs of a base model into a staging area, and nothing else of its directory."""

import json
import shutil
import struct
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_NAMES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
_PATTERNS = ("*.tiktoken", "additional_chat_templates/*.jinja")
_TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


def model_files(source: Path) -> tuple[str, ...]:
    """Relative paths of the files to import.

    Raises Conflict(BASE_MODEL_UNUSABLE) when the directory is missing, has no configuration, no tokenizer, or weights
    that are incomplete or not safetensors.
    """
    if not source.is_dir():
        raise _unusable(source, "is not a directory that the registry can read")
    _check_config(source)
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise _unusable(source, f"has no tokenizer: expected one of {', '.join(_TOKENIZERS)}")
    _check_tokenizer(source)
    shards = _shards(source)
    for shard in shards:
        _check_safetensors(source, shard)
    names = {name for name in _NAMES if (source / name).is_file()}
    names |= {path.relative_to(source).as_posix() for pattern in _PATTERNS for path in source.glob(pattern)}
    index = {INDEX} if shards != (WEIGHTS,) else set()
    return tuple(sorted({*names, *shards, *index}))


def copy_model(source: Path, target: Path) -> None:
    """Copies the files to import into an empty directory. A copy, because a link would let the store change with the
    source. Raises Conflict(BASE_MODEL_UNUSABLE); a full disk is an OSError."""
    for name in model_files(source):
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source / name, destination)
        except (PermissionError, FileNotFoundError) as error:
            raise _unusable(source, f"has {name}, which cannot be read: {error.strerror}") from None


def _check_config(source: Path) -> None:
    try:
        config = json.loads((source / CONFIG).read_bytes())
    except FileNotFoundError:
        raise _unusable(source, f"has no {CONFIG}") from None
    except (ValueError, OSError) as error:
        raise _unusable(source, f"has a {CONFIG} that cannot be read: {error}") from None
    if not isinstance(config, dict) or not ("model_type" in config or "architectures" in config):
        raise _unusable(source, f"has a {CONFIG} without model_type and architectures")


def _check_tokenizer(source: Path) -> None:
    """A download that stopped half-way would be found by the first chat only. A library reads more than its JSON."""
    try:
        if not isinstance(json.loads((source / TOKENIZER).read_bytes()), dict):
            raise _unusable(source, f"has a {TOKENIZER} that is not a JSON object")
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        raise _unusable(source, f"has a {TOKENIZER} that cannot be read: {error}") from None


def _shards(source: Path) -> tuple[str, ...]:
    if (source / WEIGHTS).is_file():
        return (WEIGHTS,)
    try:
        weight_map = json.loads((source / INDEX).read_bytes())["weight_map"]
        shards = sorted({str(name) for name in weight_map.values()})
    except FileNotFoundError:
        raise _unusable(source, f"has neither {WEIGHTS} nor {INDEX}; convert the weights to safetensors") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unusable(source, f"has an {INDEX} without a weight_map") from None
    outside = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
    missing = [name for name in shards if name not in outside and not (source / name).is_file()]
    if outside or missing or not shards:
        raise _unusable(source, f"has an {INDEX} whose files are missing or not safetensors: {outside + missing}")
    return tuple(shards)


def _check_safetensors(source: Path, name: str) -> None:
    """The header's length and the last tensor's end must fit the file: catches downloads that stopped and pointers to
    files kept elsewhere. Format: 8 bytes little-endian header length N, N bytes of JSON, the tensors."""
    path = source / name
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("header too long")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        complete = 8 + length + max(ends) == path.stat().st_size
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        complete = False
    if not complete:
        raise _unusable(source, f"has {name}, which is not a complete safetensors file; fetch it again")


def _unusable(source: Path, what: str) -> Conflict:
    return Conflict(
        f"base_model {str(source)!r} {what}; expected a Hugging Face model directory with {CONFIG}, a tokenizer and "
        "safetensors",
        reason=errors_pb2.REASON_BASE_MODEL_UNUSABLE,
        field="base_model",
    )
