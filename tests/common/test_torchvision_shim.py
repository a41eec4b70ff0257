"""Each case is a process of its own: an import happens once."""

import subprocess
import sys


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_torchvision_imports_beside_a_cpu_torch_once_the_shim_is_installed() -> None:
    code = """
import torch
from atoll.common import torchvision_shim
torchvision_shim.install()
torchvision_shim.install()
import torchvision
print(torchvision.__version__)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0.")


def test_installing_the_shim_imports_no_torch() -> None:
    code = """
import sys
from atoll.common import torchvision_shim
torchvision_shim.install()
assert "torch" not in sys.modules
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
