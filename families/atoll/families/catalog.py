"""Finds a family by name (`grpo`) or by dotted reference (`my_pkg.losses:MyFamily`)."""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import cast

from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.options import FamilyOptions
from atoll.families.refusals import family_malformed, family_unknown
from pydantic import JsonValue

AnyFamily = LossFamily[FamilyOptions]

BUNDLED: Mapping[str, str] = {
    "grpo": "atoll.families.grpo:GrpoFamily",
    "opd": "atoll.families.opd:OpdFamily",
    "openclawrl": "atoll.families.openclawrl:OpenClawRlFamily",
    "sao": "atoll.families.sao:SaoFamily",
    "sdft": "atoll.families.sdft:SdftFamily",
    "sdpo": "atoll.families.sdpo:SdpoFamily",
    "sft": "atoll.families.sft:SftFamily",
    "tttd": "atoll.families.tttd:TttdFamily",
}
"""Families of this distribution: plain name -> reference. Imported on first resolve."""

_NAME = re.compile(r"[a-z][a-z0-9]*")


def resolve_family(name_or_reference: str) -> type[AnyFamily]:
    """Returns the family's class. Once a reference was resolved, its plain name works in the same process.

    Raises: NotFound for an unknown name, with the known ones; BadConfiguration for a class that breaks the contract.
    """
    if ":" in name_or_reference:
        family = _load(name_or_reference)
        _refuse_taken_name(family)
        return family
    if name_or_reference in BUNDLED:
        return _load(BUNDLED[name_or_reference])
    loaded = _loaded_external().get(name_or_reference)
    if loaded is None:
        raise family_unknown(
            f"no loss family {name_or_reference!r}; known: {', '.join(known_families())}. "
            "A family of another package is named by reference, e.g. my_pkg.losses:MyFamily"
        )
    return loaded


def make_family(name_or_reference: str, options: Mapping[str, JsonValue]) -> AnyFamily:
    """Resolves a family and gives it its options.

    Raises: what `resolve_family` raises, and InvalidInput for an option.
    """
    return resolve_family(name_or_reference).from_options(options)


def known_families() -> tuple[str, ...]:
    """Plain names that resolve in this process, sorted."""
    return tuple(sorted({*BUNDLED, *_loaded_external()}))


def _load(reference: str) -> type[AnyFamily]:
    module_name, _, class_name = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = vars(found)[part]
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, and something that it imports is not
        raise family_unknown(
            f"loss family {reference!r}: there is no module {error.name}; install its package"
        ) from None
    except (KeyError, TypeError):
        raise family_unknown(f"loss family {reference!r}: module {module_name} has no {class_name}") from None
    if not (isinstance(found, type) and issubclass(found, LossFamily)):
        raise family_malformed(f"loss family {reference!r}: {class_name} is not a subclass of LossFamily")
    check_declaration(found)
    return found


def check_declaration(family: type[AnyFamily]) -> None:
    """Checks that a family's class variables are there and agree with each other.

    Raises: BadConfiguration naming the class variable.
    """

    def refuse(problem: str) -> Exception:
        return family_malformed(f"loss family {family.reference()}: {problem}")

    for variable in ("name", "loss_type", "advantages"):
        if not hasattr(family, variable):
            raise refuse(f"declares no {variable}")
    if family.__abstractmethods__:
        raise refuse(f"does not implement {', '.join(sorted(family.__abstractmethods__))}")
    if not _NAME.fullmatch(family.name):
        raise refuse(f"name must be lower-case letters and digits, got {family.name!r}")
    hooks = family.required_objective_hooks
    for needed, channel, why in (
        (family.loss_type is LossType.CUSTOM_LOSS, HookChannel.LOSS, "loss_type custom_loss"),
        (family.uses_pg_loss_primitive, HookChannel.PG_LOSS, "uses_pg_loss_primitive"),
    ):
        if needed != (channel in hooks):
            raise refuse(f"{why} and the required hook {channel.value} go together; declare both or neither")
    if HookChannel.REDUCER in hooks and family.loss_type is not LossType.POLICY_LOSS:
        raise refuse(
            f"the hook {HookChannel.REDUCER.value} needs loss_type policy_loss: a custom loss reduces by itself, and "
            "the hook would never be called"
        )
    computes = HookChannel.ADVANTAGE in hooks
    if family.advantages is AdvantageSource.COMPUTED and not computes:
        raise refuse(f"advantages computed and the required hook {HookChannel.ADVANTAGE.value} go together")
    if family.advantages is AdvantageSource.FORBIDDEN and computes:
        raise refuse(f"advantages forbidden and the hook {HookChannel.ADVANTAGE.value} exclude each other")
    if family.uses_pg_loss_primitive and family.loss_type is not LossType.POLICY_LOSS:
        raise refuse("uses_pg_loss_primitive needs loss_type policy_loss")
    names = family.rollout_data_keys()
    if len(set(names)) != len(names):
        raise refuse(f"columns are declared twice: {names}")
    if family.critic_value_mask_key not in (None, *names):
        raise refuse(f"critic_value_mask_key {family.critic_value_mask_key} is not one of its columns {names}")


def _refuse_taken_name(family: type[AnyFamily]) -> None:
    taken = BUNDLED.get(family.name)
    if taken is not None and _load(taken) is not family:
        raise family_malformed(f"{family.reference()} is named {family.name}, which is a family of Atoll; rename it")
    same_name = [other for other in _concrete(LossFamily) if other.name == family.name]
    others = [other for other in same_name if other.reference() != family.reference()]
    if others:
        raise family_malformed(
            f"{family.reference()} is named {family.name}, and so is {others[0].reference()}; rename one"
        )


def _loaded_external() -> Mapping[str, type[AnyFamily]]:
    """Families whose class was loaded by its reference: Python's own list of subclasses is the register."""
    return {family.name: family for family in _concrete(LossFamily) if family.name not in BUNDLED}


def _concrete(base: type[object]) -> Iterator[type[AnyFamily]]:
    for child in cast(list[type[AnyFamily]], base.__subclasses__()):
        if "name" in vars(child) and not child.__abstractmethods__:
            yield child
        yield from _concrete(child)
