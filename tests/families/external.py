"""A family of another distribution, written into a temporary package that tests put on the path."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPEC = '''
from typing import ClassVar
import numpy as np
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.group_ready import GroupReady
from atoll.families.options import FamilyOptions
from atoll.families.policy_spec import OldPolicy, PolicyGradientWeight, PolicyLossSpec
from atoll.families.signal import StepSignal


class MaskedOptions(FamilyOptions):
    lower: float = 0.5
    upper: float = 2.0


class MaskedFamily(LossFamily[MaskedOptions]):
    """-sg[f(r)] A l with f(r) = r strictly inside (lower, upper), else 0; r against the recorded log-probs."""

    name: ClassVar[str] = "NAME"
    loss_type: ClassVar[LossType] = LossType.POLICY_LOSS
    advantages: ClassVar[AdvantageSource] = AdvantageSource.REQUIRED
    uses_pg_loss_primitive: ClassVar[bool] = True
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.PG_LOSS})
    Options: ClassVar[type[FamilyOptions]] = MaskedOptions

    @property
    def batching(self):
        return GroupReady(1, 1)

    def policy_loss_spec(self):
        return PolicyLossSpec(old_policy=OldPolicy.ROLLOUT)

    def prepare(self, batch, state):
        ones = tuple(np.full(row.response_length, row.reward, dtype=np.float32) for row in batch.rows)
        return StepSignal(ones, {}, {"jobs": int(state.get("jobs", 0)) + 1})

    def policy_gradient_weight(self, run):
        return PolicyGradientWeight.masked(self.options.lower, self.options.upper)
'''

OBJECTIVE = """
from atoll.families.family import HookChannel
from atoll.families.losses.hooks import objective_hook


@objective_hook(HookChannel.PG_LOSS)
def NAME_loss(args, ppo_kl, log_probs, advantages):
    ratio = (-ppo_kl).exp().detach()
    inside = (ratio > args.options.lower) & (ratio < args.options.upper)
    return -(ratio * inside) * advantages * log_probs, (~inside).float()
"""


@contextmanager
def external_package(
    directory: Path, name: str, *, spec: str = SPEC, objective: str | None = OBJECTIVE
) -> Iterator[str]:
    """Puts package `<name>_pkg` with a family `<name>` on the path; yields the family's reference."""
    package = directory / f"{name}_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "losses.py").write_text(spec.replace("NAME", name))
    if objective is not None:
        (package / "objective.py").write_text(objective.replace("NAME", name))
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield f"{name}_pkg.losses:MaskedFamily"
    finally:
        sys.path.remove(str(directory))
