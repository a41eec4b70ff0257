"""Families are found by name or reference; what breaks the contract is refused with the class variable."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import BadConfiguration, NotFound
from atoll.families.catalog import BUNDLED, check_declaration, known_families, make_family, resolve_family
from atoll.families.family import AdvantageSource, HookChannel, LossType
from atoll.families.grpo import GrpoFamily
from atoll.families.rows import ColumnDtype, ColumnSpec
from pydantic import JsonValue

from tests.families.external import SPEC, external_package

MINIMAL_OPTIONS: dict[str, dict[str, JsonValue]] = {"sao": {"eps_clip_high": 5.0}}
"""Of families with an option that has no default."""


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_family_resolves_under_its_name_and_by_its_reference(name: str) -> None:
    family = resolve_family(name)
    assert family.name == name
    assert resolve_family(family.reference()) is family
    assert make_family(name, MINIMAL_OPTIONS.get(name, {})).options == family.Options(**MINIMAL_OPTIONS.get(name, {}))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match=r"no loss family 'gppo'; known: .*grpo") as caught:
        resolve_family("gppo")
    assert caught.value.reason == errors_pb2.REASON_FAMILY_NOT_FOUND


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_package.losses:Family", "no module no_such_package"),
        ("atoll.families.no_such_module:Family", "no module atoll.families.no_such_module"),
        ("atoll.families.grpo.spec:Missing", "has no Missing"),
        ("atoll.families.grpo.spec:GrpoFamily.missing", "has no GrpoFamily.missing"),
    ],
)
def test_a_reference_to_nothing_says_what_is_missing(reference: str, message: str) -> None:
    with pytest.raises(NotFound, match=message):
        resolve_family(reference)


def test_a_reference_to_something_else_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="not a subclass of LossFamily"):
        resolve_family("atoll.families.grpo.spec:GrpoOptions")


def test_an_external_family_is_known_by_its_plain_name_once_its_reference_was_resolved(tmp_path: Path) -> None:
    with external_package(tmp_path, "outsider") as reference:
        assert "outsider" not in known_families()
        family = resolve_family(reference)
        assert family.reference() == reference
        assert "outsider" in known_families()
        assert resolve_family("outsider") is family
        assert make_family("outsider", {"upper": 3.0}).options.model_dump() == {"lower": 0.5, "upper": 3.0}


def test_a_family_whose_own_import_fails_shows_that_error(tmp_path: Path) -> None:
    with (
        external_package(tmp_path, "broken", spec="import no_such_dependency\n" + SPEC) as reference,
        pytest.raises(ModuleNotFoundError, match="no_such_dependency"),
    ):
        resolve_family(reference)


def test_a_foreign_family_cannot_take_a_bundled_name(tmp_path: Path) -> None:
    # In a process of its own: a class stays known for as long as its process lives.
    with external_package(tmp_path, "grpo") as reference:
        script = f"from atoll.families.catalog import resolve_family\nresolve_family({reference!r})"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode != 0
    assert "grpo_pkg.losses:MaskedFamily is named grpo, which is a family of Atoll" in done.stderr


def test_declarations_that_contradict_each_other_are_refused() -> None:
    # Derived from grpo without a name of their own, so that they do not become known families.
    class Custom(GrpoFamily):
        loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS

    class Undeclared(GrpoFamily):
        required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.PG_LOSS})

    class Computed(GrpoFamily):
        advantages: ClassVar[AdvantageSource] = AdvantageSource.COMPUTED

    class Forbidden(GrpoFamily):
        advantages: ClassVar[AdvantageSource] = AdvantageSource.FORBIDDEN
        required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.ADVANTAGE})

    class Primitive(GrpoFamily):
        loss_type: ClassVar[LossType] = LossType.CUSTOM_LOSS
        uses_pg_loss_primitive: ClassVar[bool] = True
        required_objective_hooks: ClassVar[frozenset[HookChannel]] = frozenset({HookChannel.PG_LOSS, HookChannel.LOSS})

    class Twice(GrpoFamily):
        columns: ClassVar[tuple[ColumnSpec, ...]] = (ColumnSpec("x", ColumnDtype.INT32),) * 2

    class Mask(GrpoFamily):
        critic_value_mask_key: ClassVar[str | None] = "action_mask"

    for family, message in (
        (Custom, "loss_type custom_loss and the required hook custom_loss_function"),
        (Undeclared, "uses_pg_loss_primitive and the required hook custom_pg_loss_function"),
        (Computed, "advantages computed and the required hook custom_advantage_function"),
        (Forbidden, "advantages forbidden and the hook custom_advantage_function exclude each other"),
        (Primitive, "needs loss_type policy_loss"),
        (Twice, "columns are declared twice"),
        (Mask, "critic_value_mask_key action_mask is not one of its columns"),
    ):
        with pytest.raises(BadConfiguration, match=message):
            check_declaration(family)


TRAINED_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
from atoll.families.catalog import make_family
from atoll.families.rows import Batch, Row
from atoll.families.steps import build_train_steps

family = make_family("grpo", {"groups_per_step": 1, "n_samples_per_prompt": 2})
rows = tuple(
    Row(str(n), str(n), "g", np.arange(4, dtype=np.int32), 2, np.ones(2, np.uint8), np.zeros(2, np.float32), 1.0, n)
    for n in range(2)
)
batch = Batch("job-1", 1, rows)
(step,) = build_train_steps(family, batch, family.prepare(batch, {}))
print([row.advantages.tolist() for row in step.rows])
"""


def test_the_driver_side_of_a_family_works_where_torch_is_not_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINED_WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[-0.707")
