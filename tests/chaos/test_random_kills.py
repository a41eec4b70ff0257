"""The short form of `make chaos`: a dozen kills, a stopped lease holder and a rollback."""

from pathlib import Path

import pytest

from tests.chaos.deployment import Shape
from tests.chaos.run import LEASE_TTL_S, ChaosRun, Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_dozen_random_kills_break_nothing(tiny_models: Path, tmp_path: Path) -> None:
    settings = {"LEASE_TTL_S": str(LEASE_TTL_S), "CHECKPOINT_EVERY_N_VERSIONS": "3"}
    shape = Shape(trainers=2, engines=2, trainer_settings=settings)
    plan = Plan(12, seed=5, shape=shape, stop_every_kills=5, rollback_every_kills=8)
    outcome = await ChaosRun(tmp_path, tiny_models / "student", plan).execute()
    assert not outcome.findings.any, "\n".join(outcome.findings.lines())
    assert outcome.kills.total() == 12
    assert outcome.versions["training"] >= 1
