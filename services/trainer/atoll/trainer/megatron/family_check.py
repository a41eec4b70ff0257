"""Which families this backend trains. Free of torch: the driver's process asks before it calls the workers."""

from __future__ import annotations

from atoll.common.errors import InvalidInput
from atoll.families.catalog import make_family
from atoll.families.family import HookChannel
from atoll.trainer.backend import FamilyBinding

_HOOKS = frozenset({HookChannel.LOSS, HookChannel.PG_LOSS})
"""Channels that this backend runs."""


def check_family(binding: FamilyBinding, *, has_reference: bool) -> None:
    """Refuse a family that asks for more than this backend has.

    Raises `InvalidInput` naming what it asks for, and what resolving the family raises.
    """
    family = make_family(binding.reference, binding.options).bind(binding.run)
    needs = family.configure_backend(binding.run)
    missing = [channel.value for channel in sorted(family.required_objective_hooks - _HOOKS)]
    missing += [name for name, asked in (("a critic", needs.critic), ("a frozen base", needs.frozen_base)) if asked]
    if missing:
        raise InvalidInput(
            f"loss family {family.name} needs {', '.join(missing)}, which the Megatron backend does not run;"
            f" it runs {', '.join(sorted(channel.value for channel in _HOOKS))}",
            field="family",
        )
    if needs.reference_log_probs and not has_reference:
        raise InvalidInput(
            f"loss family {family.name} compares with a reference model and none was given to load; give one",
            field="family",
        )
