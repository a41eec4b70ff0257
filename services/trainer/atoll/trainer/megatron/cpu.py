"""Everything that lets megatron-core run without CUDA. No other module knows which device it is on.

megatron-core 0.16.1 writes ``device="cuda"``, ``.cuda()`` and ``pin_memory=True`` in its optimizer, clipping and
schedules, compares ``tensor.type()`` with CUDA's names, and asks CUDA for the current device. Here each of them means
the CPU. Dropout must be 0: the tracker of CUDA's random numbers is replaced by one that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Redirects CUDA requests of the calling thread to the CPU. Not active inside custom backward functions."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not keywords:
            return torch.typename(args[0]).replace("torch.", "torch.cuda.", 1)
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        device = keywords.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            keywords["device"] = "cpu"
        return func(*args, **keywords)


def install_cpu_adapter() -> None:
    """Make this process and thread run megatron-core on the CPU, for good. Call once, before building a model.

    Raises `RuntimeError` where CUDA is visible: there megatron-core runs as it is.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU adapter was asked for where CUDA is visible: expected no CUDA device,"
            f" got {torch.cuda.device_count()}; hide them (CUDA_VISIBLE_DEVICES=) or run without the adapter"
        )
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]
