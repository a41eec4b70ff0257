"""The reference for log-probs: a float32 forward by transformers of the same weights and the same ids."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from atoll.common import torchvision_shim
from numpy.typing import NDArray

torchvision_shim.install()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402


@lru_cache(maxsize=4)
def _model(model_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def all_log_probs(
    model_path: Path, prompt: Sequence[int], response: Sequence[int] | NDArray[np.int32], temperature: float
) -> NDArray[np.float32]:
    """[R, V] log-probs of every token at each of the R response positions."""
    ids = torch.tensor([[*prompt, *(int(token) for token in response)]])
    with torch.inference_mode():
        logits = _model(model_path)(ids).logits[0, len(prompt) - 1 : -1]
        log_probs: NDArray[np.float32] = torch.log_softmax(logits.float() / temperature, dim=-1).numpy()
    return log_probs


def log_probs_of(
    model_path: Path, prompt: Sequence[int], response: Sequence[int] | NDArray[np.int32], temperature: float
) -> NDArray[np.float32]:
    """[R] log-probs of the response itself."""
    table = all_log_probs(model_path, prompt, response, temperature)
    return np.take_along_axis(table, np.asarray(response, dtype=np.int64)[:, None], axis=1)[:, 0]
