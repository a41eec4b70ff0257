"""Stands in for SGLang's compiled kernels on a CPU machine.

SGLang's CPU engine imports a few `*_cpu` kernels when it loads and calls them only for features that are off here
(speculative decoding, hierarchical cache, AMX layers). Without the real package it runs its plain torch layers,
provided the imports succeed.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"this stand-in for sgl_kernel has only *_cpu kernels, not {name!r}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, and SGLang runs here without its compiled kernels; "
            "turn off the feature that needs it or install sglang-kernel"
        )

    return missing
