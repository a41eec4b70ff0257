"""Every stack that comes with Atoll starts and answers."""

from pathlib import Path

import pytest
from atoll.cli.stack_file import BUNDLED

from tests.e2e.live_stack import LiveStack


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in BUNDLED.glob("*.yaml")))
def test_a_bundled_stack_starts_and_answers(name: str, tmp_path: Path, tiny_models: Path) -> None:
    stack = LiveStack(tmp_path / "run", tiny_models / "student", name)
    stack.start()
    try:
        assert stack.chat().weight_version == "1:0"
    finally:
        stack.close()
