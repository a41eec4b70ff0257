"""What the tests of worker groups run in their ranks."""

import os
import signal
import subprocess
import sys
import time

from atoll.trainer.workers.group import WorkerPlace, WorkerRefusal


class Calculator:
    """Does what a test asks of one rank."""

    def __init__(self, place: WorkerPlace, base: int) -> None:
        self._place = place
        self._base = base

    def where(self) -> tuple[int, int, str]:
        return self._place.rank, self._place.size, self._place.rendezvous

    def process_id(self) -> int:
        return os.getpid()

    def add(self, number: int) -> int:
        return self._base + number + 100 * self._place.rank

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail_on(self, rank: int) -> None:
        if rank == self._place.rank:
            raise ValueError(f"rank {rank} cannot")
        time.sleep(600)

    def refuse(self, ranks: list[int]) -> str:
        if self._place.rank in ranks:
            raise WorkerRefusal("not this input")
        return "done"

    def kill_self_on(self, rank: int, text: str) -> None:
        if rank == self._place.rank:
            print(text)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def start_helper(self) -> int:
        """A child that would live for minutes; it belongs to the rank's process group."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def start_forked_helper(self) -> int:
        """A forked child, the way torch_dist writes its files."""
        import multiprocessing

        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        assert process.pid is not None
        return process.pid

    def start_library_helper(self) -> int:
        """A manager process as multiprocessing spawns it, the way torch_dist saving does."""
        import multiprocessing

        self._manager = multiprocessing.get_context("spawn").Manager()
        process: object = vars(self._manager)["_process"]
        pid: int = process.pid  # type: ignore[attr-defined]
        return pid

    def listening_helper(self) -> str:
        """The socket of such a manager."""
        self.start_library_helper()
        return str(self._manager.address)


class Broken:
    """Cannot be built."""

    def __init__(self, place: WorkerPlace) -> None:
        raise RuntimeError(f"no device for rank {place.rank}")
