"""A family of another package that lets the workers compute its advantages."""

from typing import ClassVar

from atoll.families.family import AdvantageSource, HookChannel
from atoll.families.grpo import GrpoFamily


class ComputedFamily(GrpoFamily):
    """Declares what no backend does yet."""

    name: ClassVar[str] = "computed"
    advantages: ClassVar[AdvantageSource] = AdvantageSource.COMPUTED
    required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.ADVANTAGE})
