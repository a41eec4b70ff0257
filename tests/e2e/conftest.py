"""One deployment for every test that leaves it as it found it: up, and with all that was reported trained."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_stack import LiveStack

TEST_SECONDS = 1200
"""The first test of a session also waits for the whole stack to start; on a busy machine that takes minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def live_stack(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[LiveStack]:
    """A running stack around `tiny_models/student`. Tests add samples and versions and must not count on numbers."""
    stack = LiveStack(tmp_path_factory.mktemp("live-stack") / "run", tiny_models / "student")
    stack.start()
    try:
        yield stack
    finally:
        stack.close()
