"""A family of another package that reduces the stock policy loss in its own way."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from atoll.families.family import HookChannel
from atoll.families.grpo.spec import GrpoFamily, GrpoOptions
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import PolicyGradientWeight
from atoll.families.rows import Batch, Column, ColumnDtype, ColumnOrigin, ColumnSpec
from atoll.families.run_settings import RunSettings
from atoll.families.signal import StepSignal

SHARE = "token_share"


class ReducedOptions(GrpoOptions):
    """Options of the test's family."""

    bound: float = 1e9


class ReducedFamily(GrpoFamily):
    """grpo whose token t of a rollout weighs 1 / (N (t + 1)), each share cut off at +-bound."""

    name: ClassVar[str] = "reduced"
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.REDUCER})
    Options: ClassVar[type[FamilyOptions]] = ReducedOptions
    columns: ClassVar[tuple[ColumnSpec, ...]] = (
        ColumnSpec(SHARE, ColumnDtype.FLOAT64, ColumnOrigin.DRIVER, response_aligned=True),
    )

    def build_rollout_data(self, batch: Batch, signal: StepSignal) -> Sequence[Mapping[str, Column]]:
        return [{SHARE: 1 / (len(batch.rows) * np.arange(1.0, row.response_length + 1))} for row in batch.rows]

    def policy_gradient_weight(self, run: RunSettings) -> PolicyGradientWeight | None:
        return PolicyGradientWeight.none()
