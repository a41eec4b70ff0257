"""The store's disk reaches its floor in the middle of a step and is freed again. A program, because it mounts a disk:

unshare --user --map-root-user --mount python -m tests.chaos.full_store DIRECTORY
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

from atoll.engine.models.tiny import make_tiny

from tests.chaos.databases import StoredJob
from tests.chaos.deployment import Shape
from tests.chaos.stage import Stage, stage

DISK_BYTES = 64 << 20
LEFT_BYTES = 1 << 20
"""Enough for the registry's database, too little for a version."""
PATIENCE_SECONDS = 6.0
SOON_SECONDS = 20.0


def newest_job(here: Stage) -> StoredJob:
    return list(here.observer.read()[1].jobs.values())[-1]


async def main(directory: Path) -> None:
    """Asserts that the step is kept, the job waits, says why, and ends by itself."""
    store = directory / "run" / "store"
    store.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(store)], check=True)
    ballast = directory / "run" / "store" / "lost+found"
    async with stage(directory / "run", make_tiny(directory / "model", 0), Shape()) as here:
        await here.feed("first")
        await here.until_head(1)
        await here.check()
        (worker,) = here.deployment["trainer-1"].workers()
        os.kill(worker, signal.SIGSTOP)
        await here.feed("second")
        await here.until(lambda: newest_job(here).phase == "running", "the step begins")
        ballast.write_bytes(bytes(shutil.disk_usage(store).free - LEFT_BYTES))
        os.kill(worker, signal.SIGCONT)
        await here.until(lambda: newest_job(here).reason is not None, "the job says why it waits")
        await asyncio.sleep(PATIENCE_SECONDS)
        waiting = newest_job(here)
        assert here.observer.head == 1 and waiting.reason == "REASON_STORAGE_FULL", waiting
        assert here.deployment["trainer-1"].workers() == [worker], "the workers keep the step"
        ballast.unlink()
        took = await here.until_head(2, SOON_SECONDS)
        ended = newest_job(here)
        assert (ended.phase, ended.attempt) == ("committed", 1), f"the step was taken again: {ended}"
        print(f"committed {took:.1f} s after the disk was freed, in attempt 1")
        await here.check()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    asyncio.run(main(parser.parse_args().directory))
