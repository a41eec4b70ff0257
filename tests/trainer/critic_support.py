"""Rows and steps of sao, and a critic in float64 to compare with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from atoll.families.catalog import make_family
from atoll.families.rows import Batch, Column, Row
from atoll.families.run_settings import RunSettings
from atoll.families.sao.spec import SaoFamily, SaoOptions
from atoll.families.steps import TrainStep, build_train_steps
from atoll.trainer.backend import FamilyBinding
from pydantic import JsonValue

from tests.trainer.megatron_oracle import Oracle
from tests.trainer.megatron_support import CLIP, EPSILON, VOCAB, WEIGHT_DECAY, make_rows

CRITIC_RATE = 1e-2


def sao_binding(**options: JsonValue) -> FamilyBinding:
    values: dict[str, JsonValue] = {"eps_clip": 0.5, "eps_clip_high": 5.0, "critic_lr": CRITIC_RATE, **options}
    return FamilyBinding("sao", values, RunSettings(VOCAB, 64))


def sao_rows(groups: int = 4, one_token: bool = False) -> tuple[Row, ...]:
    """Rows with observations inside some responses."""
    rows = []
    for row in make_rows(groups=groups, per_group=4 if groups > 1 else 1):
        if one_token:
            row = replace(
                row,
                tokens=row.tokens[: row.prompt_length + 1],
                loss_mask=np.ones(1, dtype=np.uint8),
                rollout_log_probs=row.rollout_log_probs[:1],
            )
        actions = np.ones(row.response_length, dtype=np.uint8)
        actions[1:-1:4] = 0
        columns: dict[str, Column] = {
            "action_mask": actions,
            "producer_version": np.asarray([1, 0], dtype=np.int64),
            "created_at": np.asarray(0.0, dtype=np.float64),
        }
        rows.append(replace(row, columns=columns))
    return tuple(rows)


def sao_steps(rows: Sequence[Row], binding: FamilyBinding) -> tuple[TrainStep, ...]:
    family = make_family(binding.reference, binding.options)
    batch = Batch("job-test", 1, tuple(rows))
    return build_train_steps(family, batch, family.prepare(batch, {}))


def sao_family(binding: FamilyBinding) -> SaoFamily:
    return SaoFamily(SaoOptions.model_validate(dict(binding.options)))


class CriticOracle:
    """The base's hidden states under a value head, in float64 with autograd and torch's AdamW."""

    def __init__(self, directory: Path) -> None:
        self._base = Oracle(directory).model.model
        self.head = torch.nn.Linear(self._base.config.hidden_size, 1).double()
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        parameters = [*self._base.parameters(), *self.head.parameters()]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(groups, lr=CRITIC_RATE, betas=(0.9, 0.95), eps=EPSILON)

    def values(self, row: Row) -> torch.Tensor:
        """[R] of the state before each response token."""
        hidden = self._base(torch.as_tensor(row.tokens, dtype=torch.int64)[None], use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden)[0, row.prompt_length - 1 : -1, 0]
        return values

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step, after clipping, by Hugging Face name; the head's left out."""
        return {f"model.{name}": p.grad for name, p in self._base.named_parameters() if p.grad is not None}

    def step(self, rows: Sequence[Row], old: Sequence[torch.Tensor], returns: Sequence[torch.Tensor]) -> float:
        """One step of the clipped value loss (0.2) over mask and action mask, each row by its mean; returns it."""
        loss = torch.zeros((), dtype=torch.float64)
        for row, before, wanted in zip(rows, old, returns, strict=True):
            keep = torch.as_tensor(row.loss_mask & row.columns["action_mask"].astype(np.uint8), dtype=torch.float64)
            values = self.values(row)
            bounded = before + (values - before).clamp(-0.2, 0.2)
            worst = torch.maximum((values - wanted) ** 2, (bounded - wanted) ** 2)
            loss = loss + (worst * keep).sum() / keep.sum().clamp(min=1) / len(rows)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        return float(loss.detach())
