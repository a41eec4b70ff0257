"""What the Megatron backend must agree with: transformers in float64, row by row, with autograd and torch's AdamW."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from atoll.families.rows import Row
from atoll.families.steps import TrainStep

from tests.trainer.megatron_support import CLIP, EPSILON, WEIGHT_DECAY

Gradients = Mapping[str, torch.Tensor] | Mapping[str, npt.NDArray[np.float32]]
"""By Hugging Face name."""


class Oracle:
    """A transformers model in float64, row by row, with autograd and torch's AdamW."""

    def __init__(self, directory: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )
        self._optimizer: torch.optim.AdamW | None = None

    def logits(self, row: Row) -> torch.Tensor:
        """[R, V]: those that predict the response."""
        ids = torch.as_tensor(row.tokens, dtype=torch.int64)[None]
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[0]
        return logits[row.prompt_length - 1 : -1]

    def log_probs(self, row: Row) -> torch.Tensor:
        """[R] at the row's temperature."""
        ids = torch.as_tensor(row.response_tokens, dtype=torch.int64)
        return torch.log_softmax(self.logits(row) / row.temperature, -1).gather(1, ids[:, None])[:, 0]

    def grpo_loss(
        self, step: TrainStep, old: "Oracle | None" = None, ref: "Oracle | None" = None, kl_coef: float = 0.0
    ) -> torch.Tensor:
        """The clipped surrogate (eps 0.2) with k3, written out from the formulas."""
        loss = torch.zeros((), dtype=torch.float64)
        for item in step.rows:
            now = self.log_probs(item.row)
            before = now.detach() if old is None else old.log_probs(item.row).detach()
            advantage = torch.as_tensor(item.advantages, dtype=torch.float64)
            ratio = torch.exp(now - before)
            token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if ref is not None:
                d = now - ref.log_probs(item.row).detach()
                token_loss = token_loss + kl_coef * (torch.exp(-d) - 1 + d)
            mask = torch.as_tensor(item.mask, dtype=torch.float64)
            loss = loss + (token_loss * mask).sum() * item.weights.policy
        return loss

    def step(self, loss: torch.Tensor, learning_rate: float) -> tuple[float, dict[str, torch.Tensor]]:
        """One AdamW step; returns the gradient norm and the clipped gradients."""
        if self._optimizer is None:
            matrices = [p for p in self.model.parameters() if p.dim() > 1]
            vectors = [p for p in self.model.parameters() if p.dim() == 1]
            groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
            self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=EPSILON)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
        self._optimizer.step()
        return norm, {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def relative_error(found: npt.NDArray[np.float32], expected: torch.Tensor | npt.NDArray[np.float32]) -> float:
    """The largest difference over the largest expected magnitude; of zeros, the largest magnitude found."""
    wanted = np.asarray(expected, dtype=np.float64)
    scale = float(np.abs(wanted).max())
    return float(np.abs(found.astype(np.float64) - wanted).max()) / (scale or 1.0)


def same_gradients(found: Mapping[str, npt.NDArray[np.float32]], expected: Gradients, limit: float = 1e-5) -> None:
    """Asserts that no parameter's gradient is further off than `limit` of the largest entry of its tensor."""
    errors = {name: relative_error(found[name], wanted) for name, wanted in expected.items()}
    off = {name: error for name, error in errors.items() if not error < limit}
    assert not off, f"gradients are off by more than {limit:g} of their largest entry: {off}"
