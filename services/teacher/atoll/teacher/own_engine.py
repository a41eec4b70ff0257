"""The teacher's own engine: `python -m atoll.engine` as a child process that does not outlive it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog
from atoll.teacher.settings import TeacherSettings

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-m", "atoll.engine")
KEPT_SETTINGS_PREFIX = "ATOLL_ENGINE_"


def engine_environment(settings: TeacherSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """ATOLL_ENGINE_* are passed on, so that the engine can be tuned; what it serves, and where, is the teacher's."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("ATOLL_") or name.startswith(KEPT_SETTINGS_PREFIX) or name == "ATOLL_LOG_LEVEL"
    }
    return kept | {
        "ATOLL_ENGINE_HOST": "127.0.0.1",
        "ATOLL_ENGINE_PORT": str(settings.engine_port),
        "ATOLL_ENGINE_MODEL_PATH": str(settings.model_path),
        "ATOLL_ENGINE_DIE_WITH_PARENT": "true",
    }


@asynccontextmanager
async def own_engine(
    command: tuple[str, ...], environment: Mapping[str, str], stop_timeout_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts the engine; stops it on the way out, by force after `stop_timeout_s`."""
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(stop_timeout_s):
                    await process.wait()
            except TimeoutError:
                log.warning("the engine does not stop, killing it")
                process.kill()
                await process.wait()
