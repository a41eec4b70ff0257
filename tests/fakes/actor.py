"""An actor without a backend: a toy model whose weights are a table, on one rank."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from atoll.families.catalog import AnyFamily
from atoll.families.losses.actor import CURRENT_WEIGHTS, RowReader
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.vocab import VocabShard
from atoll.families.options import FamilyOptions
from atoll.families.rows import Row
from atoll.families.run_settings import HookArgs, RunSettings
from atoll.families.steps import TrainRow
from torch import Tensor


class TableActor:
    """Logits after a prefix are the mean of its tokens' rows in a table [V, V]: they depend on the whole prompt."""

    def __init__(self, family: AnyFamily, run: RunSettings, table: Tensor) -> None:
        self.args: HookArgs[FamilyOptions] = HookArgs(family.options, run)
        self.weights = {CURRENT_WEIGHTS: table}
        self.forwards: list[tuple[str, tuple[str, ...]]] = []
        self.computes_loss = True
        self._columns = family.run_columns(run)
        self._vocab_size = run.vocab_size

    def has_weights(self, name: str) -> bool:
        return name in self.weights

    def keep_weights(self, name: str) -> None:
        self.weights[name] = self.weights[CURRENT_WEIGHTS].clone()

    def keep_checkpoint_weights(self, name: str, directory: str) -> None:
        raise NotImplementedError

    def update_moving_average(self, name: str, rate: float) -> None:
        raise NotImplementedError

    def forward_rows(self, weights: str, rows: Sequence[TrainRow], read: RowReader) -> Sequence[Mapping[str, Tensor]]:
        self.forwards.append((weights, tuple(item.row.sample_id for item in rows)))
        if not self.computes_loss:
            return [{} for _ in rows]
        shard = VocabShard(self._vocab_size)
        return [
            read(
                build_loss_batch([item], shard=shard, columns=self._columns),
                table_logits(self.weights[weights], item.row),
            )
            for item in rows
        ]


def table_logits(table: Tensor, row: Row) -> Tensor:
    """[R, V] the logits that predict the response of a row."""
    means = table[torch.as_tensor(row.tokens[:-1].astype(np.int64))].cumsum(0)
    means = means / torch.arange(1, len(means) + 1)[:, None]
    return means[row.prompt_length - 1 :]
