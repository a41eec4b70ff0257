"""Refuses what cannot work before a minute is spent on loading it."""

import difflib
import importlib.util
import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.common.auth import is_loopback
from atoll.common.errors import BadConfiguration
from atoll.engine.settings import Device, EngineSettings


@dataclass(frozen=True)
class ModelFacts:
    """What the launcher needs to know. Example: ModelFacts("Qwen3ForCausalLM", 2048, 1024)."""

    architecture: str
    context_length: int
    vocab_size: int


def check_listener(settings: EngineSettings) -> None:
    """Raises BadConfiguration when the address is open to others by mistake, or taken."""
    if not is_loopback(settings.host) and not settings.insecure:
        raise BadConfiguration(
            f"ATOLL_ENGINE_HOST is {settings.host!r}, which other machines can reach, and SGLang asks for no token: "
            "listen on 127.0.0.1, or set ATOLL_ENGINE_INSECURE=true on a network that only Atoll's services reach",
            field="host",
        )
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise BadConfiguration(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): "
                "stop what listens there or set ATOLL_ENGINE_PORT",
                field="port",
            ) from None


def find_sglang() -> Path:
    """The directory of the installed SGLang, found without importing it (that takes ten seconds)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise BadConfiguration("SGLang is not installed in this environment; scripts/install installs it")
    return Path(spec.submodule_search_locations[0])


def check_model(model_path: Path, sglang: Path) -> ModelFacts:
    """Raises BadConfiguration unless the directory holds a model of an architecture that SGLang has."""
    if not model_path.is_dir():
        raise BadConfiguration(f"{model_path} is not a directory; expected a Hugging Face model", field="model_path")
    config_path = model_path / "config.json"
    if not config_path.is_file():
        found = ", ".join(sorted(file.name for file in model_path.iterdir())[:8]) or "nothing"
        raise BadConfiguration(
            f"{model_path} has no config.json (found {found}); expected a Hugging Face model", field="model_path"
        )
    try:
        config = json.loads(config_path.read_bytes())
        architecture = str(config["architectures"][0])
        text_config = config.get("text_config", config)
        context_length = int(text_config["max_position_embeddings"])
        vocab_size = int(text_config["vocab_size"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadConfiguration(
            f"{config_path} does not describe a language model: {type(error).__name__} {error}", field="model_path"
        ) from None
    if not any(model_path.glob("*.safetensors")):
        raise BadConfiguration(f"{model_path} has no .safetensors weights", field="model_path")
    _check_architecture(architecture, config_path, sglang)
    return ModelFacts(architecture, context_length, vocab_size)


def pick_device(wanted: Device) -> Device:
    """CPU or CUDA. Raises BadConfiguration when a GPU is wanted and torch sees none."""
    if wanted is not Device.CPU and _has_gpu():
        return Device.CUDA
    if wanted is Device.CUDA:
        raise BadConfiguration("ATOLL_ENGINE_DEVICE is cuda and torch sees no GPU; set it to cpu", field="device")
    return Device.CPU


def _has_gpu() -> bool:
    if not Path("/dev/nvidiactl").exists():
        return False
    # In another process: a launcher that imported torch would hold 300 MB for as long as the engine runs.
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def _check_architecture(architecture: str, config_path: Path, sglang: Path) -> None:
    known: set[str] = set()
    for source in (sglang / "srt" / "models").rglob("*.py"):
        known.update(re.findall(r"^class (\w+)\b", source.read_text(errors="ignore"), re.MULTILINE))
    if architecture not in known:
        near = difflib.get_close_matches(architecture, known, n=3)
        hint = f"; it has {', '.join(near)}" if near else ""
        raise BadConfiguration(
            f"{config_path} names the architecture {architecture}, which SGLang cannot serve{hint}", field="model_path"
        )
