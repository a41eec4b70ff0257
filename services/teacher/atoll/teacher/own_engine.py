"""The teacher's own engine: `python -m atoll.engine` as a child process that does not outlive it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineUnavailable
from atoll.common.errors import BadConfiguration
from atoll.teacher.settings import TeacherSettings

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25
KEPT_SETTINGS_PREFIX = "ATOLL_ENGINE_"


def engine_environment(settings: TeacherSettings, inherited: dict[str, str]) -> dict[str, str]:
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
async def own_engine(settings: TeacherSettings) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts the engine; stops it on the way out, by force after `stop_timeout_s`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "atoll.engine", env=engine_environment(settings, dict(os.environ))
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(settings.stop_timeout_s):
                    await process.wait()
            except TimeoutError:
                log.warning("the engine does not stop, killing it")
                process.kill()
                await process.wait()


async def until_sampling(
    client: EngineClient, timeout_s: float, process: asyncio.subprocess.Process | None = None
) -> None:
    """Returns once the engine has sampled a token. Raises BadConfiguration when it ends or is not ready in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if process is not None and process.returncode is not None:
                    raise BadConfiguration(
                        f"the teacher's engine ended with status {process.returncode}; its log says why"
                    )
                try:
                    await client.model_info()
                    await client.weight_version()
                    return
                except EngineUnavailable:
                    await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise BadConfiguration(f"the engine {client.base_url} did not sample within {timeout_s:g} s") from None
