"""Objective hooks are found beside the family and checked before a worker trains; nothing falls back."""

from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.families.catalog import BUNDLED, resolve_family
from atoll.families.losses.hooks import ObjectiveHooks, resolve_hooks

from tests.families.external import OBJECTIVE, external_package


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_family_has_its_hooks(name: str) -> None:
    resolve_hooks(resolve_family(name))


def test_a_family_on_the_stock_lane_has_none() -> None:
    assert resolve_hooks(resolve_family("grpo")) == ObjectiveHooks()


def test_a_declared_hook_is_found_and_called_like_its_function(tmp_path: Path) -> None:
    with external_package(tmp_path, "hooked") as reference:
        hooks = resolve_hooks(resolve_family(reference))
    assert hooks.pg_loss is not None
    assert hooks.pg_loss.__name__ == "hooked_loss"
    assert hooks.loss is None


def test_a_missing_module_stops_the_worker(tmp_path: Path) -> None:
    with (
        external_package(tmp_path, "hookless", objective=None) as reference,
        pytest.raises(
            BadConfiguration, match=r"hookless: its hooks should be in hookless_pkg\.objective, which is missi"
        ),
    ):
        resolve_hooks(resolve_family(reference))


PRE_TRAIN = (
    "\n\n@objective_hook(HookChannel.ACTOR_PRE_TRAIN)\ndef NAME_actor_pre_train(actor, rollout_data):\n    pass\n"
)


@pytest.mark.parametrize(
    ("name", "objective", "message"),
    [
        ("nohook", "x = 1", "must have hooks for custom_pg_loss_function, got none"),
        ("twohooks", OBJECTIVE + PRE_TRAIN, "got actor_pre_train_hook, custom_pg_loss_function"),
        ("misnamed", OBJECTIVE.replace("NAME_loss", "my_loss"), "must be named misnamed_loss, got my_loss"),
        ("arity", OBJECTIVE.replace(", advantages):", "):"), "must take 4 arguments, got 3"),
    ],
)
def test_hooks_that_differ_from_the_declaration_stop_the_worker(
    tmp_path: Path, name: str, objective: str, message: str
) -> None:
    with (
        external_package(tmp_path, name, objective=objective) as reference,
        pytest.raises(BadConfiguration, match=message),
    ):
        resolve_hooks(resolve_family(reference))
