"""Objective hooks: the torch functions of a family's `objective.py`, found and checked when a worker starts.

```python
@objective_hook(HookChannel.LOSS)
def my_loss(args, batch, logits, reduce):  # named <family><suffix>
    ...
```
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar, cast

from atoll.families.catalog import AnyFamily
from atoll.families.family import HookChannel
from atoll.families.losses.actor import Actor, RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.reducer import Reducer
from atoll.families.options import FamilyOptions
from atoll.families.refusals import family_malformed
from atoll.families.run_settings import HookArgs
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Args = HookArgs[FamilyOptions]


LossHook = Callable[[Args, LossBatch, Tensor, Reducer], tuple[Tensor, Mapping[str, Tensor]]]
PgLossHook = Callable[[Args, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ReducerHook = Callable[[Args, LossBatch, Tensor], Tensor]
AdvantageHook = Callable[[Args, RolloutData], None]
ActorInitHook = Callable[[Actor], None]
ActorPreTrainHook = Callable[[Actor, RolloutData], None]

_SUFFIX_AND_ARITY: Mapping[HookChannel, tuple[str, int]] = {
    HookChannel.LOSS: ("_loss", 4),
    HookChannel.PG_LOSS: ("_loss", 4),
    HookChannel.REDUCER: ("_reducer", 3),
    HookChannel.ADVANTAGE: ("_advantages", 2),
    HookChannel.ACTOR_INIT: ("_actor_init", 1),
    HookChannel.ACTOR_PRE_TRAIN: ("_actor_pre_train", 2),
}


@dataclass(frozen=True, slots=True)
class ObjectiveHook(Generic[P, R]):
    """A function with the channel it fills. It is called like the function."""

    channel: HookChannel
    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def objective_hook(channel: HookChannel) -> Callable[[Callable[P, R]], ObjectiveHook[P, R]]:
    """Marks a function of `objective.py` as the family's hook of a channel."""
    return lambda function: ObjectiveHook(channel, function)


@dataclass(frozen=True, slots=True)
class ObjectiveHooks:
    """The hooks of one family; None where it declares no such channel."""

    loss: LossHook | None = None
    pg_loss: PgLossHook | None = None
    reducer: ReducerHook | None = None
    advantage: AdvantageHook | None = None
    actor_init: ActorInitHook | None = None
    actor_pre_train: ActorPreTrainHook | None = None


def resolve_hooks(family: type[AnyFamily]) -> ObjectiveHooks:
    """Imports a family's `objective.py` and returns its hooks.

    Raises: BadConfiguration when the module or a declared hook is missing, when it has one that is not declared, and
    for a hook of another name or with other arguments. Nothing falls back to another loss.
    """
    required = family.required_objective_hooks
    if not required:
        return ObjectiveHooks()
    module_name = family.objective_module or f"{family.__module__.rpartition('.')[0]}.objective"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise family_malformed(
            f"loss family {family.name}: its hooks should be in {module_name}, which is missing"
        ) from None
    found: dict[HookChannel, ObjectiveHook[..., object]] = {}
    for attribute, value in vars(module).items():
        if isinstance(value, ObjectiveHook):
            _check_hook(family, module_name, attribute, value)
            found[value.channel] = value
    if set(found) != set(required):
        raise family_malformed(
            f"loss family {family.name}: {module_name} must have hooks for {_names(required)}, got {_names(found)}"
        )
    functions = {channel: hook.function for channel, hook in found.items()}
    return ObjectiveHooks(
        loss=cast(LossHook | None, functions.get(HookChannel.LOSS)),
        pg_loss=cast(PgLossHook | None, functions.get(HookChannel.PG_LOSS)),
        reducer=cast(ReducerHook | None, functions.get(HookChannel.REDUCER)),
        advantage=cast(AdvantageHook | None, functions.get(HookChannel.ADVANTAGE)),
        actor_init=cast(ActorInitHook | None, functions.get(HookChannel.ACTOR_INIT)),
        actor_pre_train=cast(ActorPreTrainHook | None, functions.get(HookChannel.ACTOR_PRE_TRAIN)),
    )


def _check_hook(family: type[AnyFamily], module_name: str, attribute: str, hook: ObjectiveHook[..., object]) -> None:
    suffix, arity = _SUFFIX_AND_ARITY[hook.channel]
    name = (family.hook_prefix or family.name) + suffix
    if attribute != name:
        raise family_malformed(
            f"loss family {family.name}: the {hook.channel.value} of {module_name} must be named {name}, "
            f"got {attribute}"
        )
    arguments = len(inspect.signature(hook.function).parameters)
    if arguments != arity:
        raise family_malformed(
            f"loss family {family.name}: {module_name}.{attribute} must take {arity} arguments, got {arguments}"
        )


def _names(channels: "frozenset[HookChannel] | Mapping[HookChannel, object]") -> str:
    return ", ".join(sorted(channel.value for channel in channels)) or "none"
