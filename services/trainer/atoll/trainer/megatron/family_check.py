"""Which families this backend trains. Free of torch: the driver's process asks before it calls the workers."""

from __future__ import annotations

from atoll.common.errors import InvalidInput
from atoll.families.catalog import make_family
from atoll.trainer.backend import FamilyBinding


def check_family(binding: FamilyBinding, *, has_reference: bool) -> None:
    """Refuse a family that asks for more than this backend has.

    Raises `InvalidInput` naming what it asks for, and what resolving the family raises.
    """
    family = make_family(binding.reference, binding.options).bind(binding.run)
    if family.configure_backend(binding.run).reference_log_probs and not has_reference:
        raise InvalidInput(
            f"loss family {family.name} compares with a reference model and none was given to load; give one",
            field="family",
        )
