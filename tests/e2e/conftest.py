"""One deployment for every test that leaves it as it found it: up, and with all that was reported trained."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_stack import LiveStack


@pytest.fixture(scope="session")
def live_stack(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[LiveStack]:
    """A running stack around `tiny_models/student`. Tests add samples and versions and must not count on numbers."""
    stack = LiveStack(tmp_path_factory.mktemp("live-stack") / "run", tiny_models / "student")
    stack.start()
    try:
        yield stack
    finally:
        stack.close()
