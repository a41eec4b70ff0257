"""Lets `import torchvision` succeed beside a CPU build of torch.

The torchvision on the package index is a CUDA build. Beside a CPU torch its compiled operators do not load, and its
first import fails with "operator torchvision::nms does not exist", because torchvision registers shape functions for
two of them. transformers and SGLang import torchvision as soon as it is installed, so every process that loads a model
or a tokenizer calls `install()` first. Declaring the two operators is enough: nothing here computes with them.

>>> from atoll.common import torchvision_shim
>>> torchvision_shim.install()
>>> import transformers  # doctest: +SKIP
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds no module: it only gets the word just before torchvision is looked for."""

    def __init__(self) -> None:
        self._library: object = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self._library is None:
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
                for name in ("nms", "qnms"):
                    library.define(f"{name}{_SCHEMA}")  # type: ignore[no-untyped-call]
                # torch forgets the operators when the library object is collected.
                self._library = library
        return None


def install() -> None:
    """Declare the operators right before torchvision's first import. Imports nothing itself; may be called again."""
    if "torchvision" in sys.modules or any(isinstance(finder, _DeclareOperators) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _DeclareOperators())
