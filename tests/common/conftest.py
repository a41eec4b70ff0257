"""Fixtures of the tests of what the services share."""

from collections.abc import AsyncIterator

import pytest
from atoll.common.engine_client import EngineClient

from tests.engines import RunningEngine


@pytest.fixture
async def engine_client(student_engine: RunningEngine) -> AsyncIterator[EngineClient]:
    """A client of `student_engine`."""
    async with student_engine.client() as client:
        yield client
