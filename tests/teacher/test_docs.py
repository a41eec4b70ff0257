"""docs/teacher.md says what the code does."""

import asyncio
import re
from pathlib import Path

import numpy as np
from atoll.teacher.engine import EngineState
from atoll.teacher.settings import TeacherSettings

from tests.fakes.scoring_server import ScoringServer, expected, write_model
from tests.teacher.teacher_world import running

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "teacher.md").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (\S+) \|", PAGE, re.MULTILINE))
    fields = {
        name.upper(): field.default
        for name, field in TeacherSettings.model_fields.items()
        if field.validation_alias is None and name != "host"
    }
    shown = {None: "none", (): "[]"}
    assert rows == {
        name: shown[value] if value in shown else str(int(value) if value == int(value) else value)
        for name, value in fields.items()
    }


def test_every_state_of_an_engine_is_named() -> None:
    assert all(state.name in PAGE for state in EngineState)


async def test_its_program_scores(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with ScoringServer(write_model(tmp_path / "model")) as server, running(server.url) as world:
        names: dict[str, object] = {"address": f"127.0.0.1:{world.teacher.server.port}"}
        await asyncio.to_thread(exec, program, names)
    assert names["shapes"] == {"log_probs": [2], "top_k_ids": [2, 2], "top_k_log_probs": [2, 2]}
    np.testing.assert_allclose(np.asarray(names["log_probs"]), expected([5, 6], [7, 8]), atol=1e-5)
