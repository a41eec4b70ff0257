"""Fixtures that several services share: tiny models and real engines that serve them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from atoll.common import torchvision_shim

from tests.engines import RunningEngine, running_engine
from tests.postgres import PostgresServer, running_postgres

# Before any test imports transformers.
torchvision_shim.install()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three models of one architecture and tokenizer: student, student-next and teacher."""
    from atoll.engine.models import make_tiny

    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "student-next", "teacher")):
        make_tiny(directory / name, seed)
    return directory


@pytest.fixture(scope="session")
def _student_engine(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("student-engine") / "log"
    with running_engine(tiny_models / "student", "1:0", log) as engine:
        yield engine


@pytest.fixture
def student_engine(_student_engine: RunningEngine) -> RunningEngine:
    """A real engine that serves `tiny_models/student` as 1:0; what a test publishes is undone before the next one."""

    async def reset() -> None:
        async with _student_engine.client() as client:
            await client.update_weights(_student_engine.model_path, _student_engine.weight_version)

    asyncio.run(reset())
    return _student_engine


@pytest.fixture(scope="session")
def teacher_engine(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """A real engine that serves `tiny_models/teacher` as 0:0. Do not publish to it."""
    log = tmp_path_factory.mktemp("teacher-engine") / "log"
    with running_engine(tiny_models / "teacher", "0:0", log) as engine:
        yield engine


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test run, without a database yet."""
    with running_postgres() as server:
        yield server
