"""An actor of one rank around a model of a few hundred numbers, and a renderer of letters, for lifecycle hooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from atoll.families.catalog import AnyFamily
from atoll.families.losses.actor import CURRENT_WEIGHTS, RolloutData, RowReader
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.options import FamilyOptions
from atoll.families.rows import Int32, Row
from atoll.families.run_settings import HookArgs, RunSettings
from atoll.families.steps import TrainRow
from pydantic import JsonValue
from torch import Tensor, nn

PADDING = 5


class TinyModel(nn.Module):
    """logits of a position from its token and the mean of all tokens so far: a prefix changes what follows."""

    def __init__(self, vocab_size: int, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocab_size, width, generator=generator))
        self.output = nn.Parameter(0.3 * torch.randn(width, vocab_size + PADDING, generator=generator))

    def forward(self, row: Row) -> Tensor:
        """[R, V + padding]: the logits that predict each response token."""
        hidden = self.embedding[torch.as_tensor(row.tokens, dtype=torch.int64)]
        so_far = hidden.cumsum(0) / torch.arange(1, len(hidden) + 1)[:, None]
        logits: Tensor = (hidden + 2 * so_far) @ self.output
        return logits[row.prompt_length - 1 : -1]


@dataclass
class TinyActor:
    """Implements `atoll.families.losses.actor.Actor` and takes optimizer steps with plain gradient descent."""

    family: AnyFamily
    run: RunSettings
    model: TinyModel
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    average: tuple[str, float] | None = None

    @property
    def args(self) -> HookArgs[FamilyOptions]:
        return HookArgs(self.family.options, self.run)

    def has_weights(self, name: str) -> bool:
        return name in self.kept

    def keep_weights(self, name: str) -> None:
        self.calls.append(f"keep {name}")
        self.kept[name] = self._own()

    def keep_checkpoint_weights(self, name: str, directory: str) -> None:
        self.calls.append(f"keep {name} from {directory}")
        other = TinyModel(self.run.vocab_size, seed=int(directory))
        self.kept.setdefault(name, {key: value.clone() for key, value in other.state_dict().items()})

    def update_moving_average(self, name: str, rate: float) -> None:
        self.average = (name, rate)

    def forward_rows(self, weights: str, rows: Sequence[TrainRow], read: RowReader) -> Sequence[Mapping[str, Tensor]]:
        self.calls.append(f"forward {weights}")
        own = self._own()
        if weights != CURRENT_WEIGHTS:
            self.model.load_state_dict(self.kept[weights])
        columns = self.family.run_columns(self.run)
        answers = []
        with torch.no_grad():
            for item in rows:
                batch = build_loss_batch([item], shard=VocabShard(self.run.vocab_size), columns=columns)
                answers.append(read(batch, self.model(item.row)))
        self.model.load_state_dict(own)
        return answers

    def prepared(self, rows: Sequence[TrainRow]) -> Sequence[TrainRow]:
        """The rows after the family's pre-train hook."""
        data = RolloutData(rows)
        hook = LossFunction(self.family, self.run).hooks.actor_pre_train
        assert hook is not None
        hook(self, data)
        return data.rows

    def step(self, rows: Sequence[TrainRow], rate: float) -> Mapping[str, float]:
        """One optimizer step with its pre-train hook; returns the metrics."""
        rows = self.prepared(rows)
        logits = torch.cat([self.model(item.row) for item in rows])
        columns = self.family.run_columns(self.run)
        batch = build_loss_batch(rows, shard=VocabShard(self.run.vocab_size), columns=columns)
        result = LossFunction(self.family, self.run)(batch, logits)
        assert not bool(result.bad_rows.any())
        self.model.zero_grad()
        torch.autograd.backward(result.loss)
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=rate)
            if self.average is not None:
                name, share = self.average
                for key, value in self.model.state_dict().items():
                    self.kept[name][key] += share * (value - self.kept[name][key])
        self.average = None
        return {name: value.item() for name, value in result.metrics.items()}

    def _own(self) -> dict[str, Tensor]:
        return {key: value.detach().clone() for key, value in self.model.state_dict().items()}


@dataclass(frozen=True)
class LetterRenderer:
    """Renders chat messages as one id per letter of their contents."""

    vocab_size: int

    def render(self, messages: Sequence[Mapping[str, JsonValue]]) -> Int32:
        text = "\n".join(str(message["content"]) for message in messages)
        return np.asarray([ord(letter) % self.vocab_size for letter in text], dtype=np.int32)
