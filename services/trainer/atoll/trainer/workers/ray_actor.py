"""The Ray actor that is one rank. Ray calls its methods one at a time, in the main thread of its process."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from atoll.trainer.workers import process
from atoll.trainer.workers.host import WorkerHost

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ActorPlace:
    """Where Ray put an actor. Example: ``ActorPlace("10.0.0.7", "gpu-7", 4711, 0)``"""

    address: str
    host: str
    pid: int
    log_start: int
    """Bytes that its log had before."""


class RankActor:
    """Serves the object of one rank. Messages travel pickled: Ray's own form would make their arrays read-only."""

    def __init__(self, log_path: Path) -> None:
        self._host = WorkerHost()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        if os.getpgid(0) != os.getpid():  # helpers must be killed with this process and with no other
            os.setpgid(0, 0)
        # Helpers die with this process, forked and spawned ones alike: the latter run the main module.
        os.register_at_fork(after_in_child=process.die_with_parent)
        sys.modules["__main__"] = process

    def place(self) -> ActorPlace:
        """Answers once the actor is there."""
        return ActorPlace(ray.util.get_node_ip_address(), socket.gethostname(), os.getpid(), self._log_start)

    def rendezvous(self) -> str:
        """A torch.distributed init method that has this rank, which must be the first, hold the store."""
        self._store = hold_store(ray.util.get_node_ip_address())
        return f"tcp://{self._store.host}:{self._store.port}"

    def answer(self, message: bytes) -> bytes:
        """A pickled `Start` or `Call` in, a pickled `Answer` out."""
        return pickle.dumps(self._host.answer(pickle.loads(message)))

    def ping(self) -> None:
        """Does nothing: fails where the process is gone."""


def hold_store(address: str) -> TCPStore:
    """A store at a free port of an address, and of no other.

    `init_process_group` of the same process shares it: no other process can take the port before that.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=taken.detach()
        )
