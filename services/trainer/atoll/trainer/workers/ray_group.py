"""A worker group of Ray actors, on the machines that Ray has; imported only where Ray is chosen."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import psutil
import ray
from atoll.trainer.workers.group import WorkerLost, WorkerPlan
from atoll.trainer.workers.messages import Answer, Call, Raised, Start
from atoll.trainer.workers.outcome import GRACE_S, RankFailed, log_tail, results_of
from atoll.trainer.workers.ranks import Ranks
from atoll.trainer.workers.ray_actor import ActorPlace, RankActor
from atoll.trainer.workers.ray_bridge import Bridge
from atoll.trainer.workers.ray_connection import RayConnection

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_PING_S = 0.5


class RayWorkerGroup:
    """Implements `atoll.trainer.workers.group.WorkerGroup` with one Ray actor per rank, with a GPU if Ray has any.

    ``address`` is of a cluster to join, which gets this driver's ``bridge``; None starts a private Ray that ends with
    the group. The ranks die with the process that launched them. On several machines ``plan.log_directory`` must be
    one that all of them share.

    Raises `WorkerLost` when Ray cannot be reached, or a rank does not come up within ``plan.start_timeout_s``.
    """

    def __init__(
        self, plan: WorkerPlan, address: str | None = None, namespace: str = "atoll", bridge: Bridge | None = None
    ) -> None:
        self._ranks = Ranks.prepare(plan)
        self._lock = threading.Lock()
        self._closed = False
        self._actors: list[ActorHandle] = []
        self._places: list[ActorPlace] = []
        self._processes: list[psutil.Process] = []
        """Those on this machine."""
        deadline = time.monotonic() + plan.start_timeout_s
        try:
            self._connection = RayConnection(address, namespace, plan.size, bridge)
        except Exception as error:
            self._ranks.remove()
            where = "a private Ray could not start" if address is None else f"Ray at {address} (RAY_ADDRESS) is no use"
            raise WorkerLost(0, f"was not started: {where}: {error}", "") from error
        try:
            self._start_actors(deadline)
            rendezvous = ray.get(self._actors[0].rendezvous.remote(), timeout=max(1.0, deadline - time.monotonic()))
            self._exchange(self._ranks.starts(rendezvous), max(1.0, deadline - time.monotonic()))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.plan.size

    def call(self, method: str, arguments: Sequence[tuple[object, ...]], timeout_s: float) -> list[object]:
        """See `WorkerGroup.call`."""
        return self._exchange(self._ranks.calls(method, arguments), timeout_s)

    def alive(self) -> bool:
        """True while every rank's process runs, as far as Ray knows; a call in progress notices what this does not."""
        if self._closed or not ray.is_initialized():
            return False
        if self._lock.locked():
            return all(process.is_running() for process in self._processes)
        ready, _ = ray.wait([actor.ping.remote() for actor in self._actors], num_returns=self.size, timeout=_PING_S)
        return not any(self._death(ping) for ping in ready)

    def pids(self) -> list[int]:
        """Process ids in rank order, each on its machine."""
        return [place.pid for place in self._places]

    def kill(self) -> None:
        """Kill every rank; on this machine with its process group, before this returns."""
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        for process in self._processes:
            try:  # also where Ray was faster: the group may still have helpers in it
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        psutil.wait_procs(self._processes, timeout=5)

    def close(self) -> None:
        """Kill what still runs, leave Ray, remove the scratch directory."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._connection.close()
        self._ranks.remove()

    def log_path(self, rank: int) -> Path:
        """Where a rank's stdout and stderr go, on the machine it runs on."""
        return self._ranks.log_path(rank)

    def _start_actors(self, deadline: float) -> None:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if 0 < gpus < self.size:
            raise WorkerLost(gpus, f"has no GPU: {self.size} ranks need one each and Ray has {gpus}", "")
        # Ray shows an actor its own GPU alone, which is the first that it sees.
        environment = self._ranks.environment(0)
        if self._ranks.short is not None:
            del environment["TMPDIR"]  # the other machines do not have it
        kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_restarts=0)(RankActor)
        group = uuid4().hex[:8]
        for rank in range(self.size):
            options = kind.options(name=f"atoll-rank-{group}-{rank}", runtime_env={"env_vars": environment})
            self._actors.append(options.remote(self.log_path(rank)))
        for rank, actor in enumerate(self._actors):
            try:
                place = ray.get(actor.place.remote(), timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                reason = (
                    f"was not placed within {self._ranks.plan.start_timeout_s:g} s; Ray has {ray.available_resources()}"
                )
                raise WorkerLost(rank, f"{reason} free", "") from None
            except ray.exceptions.RayError as error:
                raise WorkerLost(rank, f"was not started: {_what_ended_it(error)}", "") from error
            self._places.append(place)
            if place.host == socket.gethostname():
                self._processes.append(psutil.Process(place.pid))

    def _exchange(self, messages: Sequence[Start | Call], timeout_s: float) -> list[object]:
        with self._lock:
            if self._closed:
                raise WorkerLost(0, "was closed with its group", "")
            deadline = time.monotonic() + timeout_s
            pending: dict[ObjectRef, int] = {}
            for rank, (actor, message) in enumerate(zip(self._actors, messages, strict=True)):
                pending[actor.answer.remote(pickle.dumps(message))] = rank
            answers: dict[int, Answer] = {}
            lost: dict[int, str] = {}
            while pending and (left := deadline - time.monotonic()) > 0:
                ready, _ = ray.wait(list(pending), timeout=left)
                for reference in ready:
                    rank = pending.pop(reference)
                    if death := self._death(reference):
                        lost[rank] = death
                    else:
                        answers[rank] = cast(Answer, pickle.loads(ray.get(reference)))
                if lost or any(isinstance(answer, Raised) for answer in answers.values()):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            try:
                return results_of(answers, lost, self.size, timeout_s)
            except RankFailed as failed:
                self.kill()
                raise WorkerLost(failed.rank, failed.reason, self._log_tail(failed.rank)) from None

    def _death(self, reference: ObjectRef) -> str | None:
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            return f"died: {_what_ended_it(error)}"
        return None

    def _log_tail(self, rank: int) -> str:
        path, place = self.log_path(rank), self._places[rank]
        if not path.exists():
            return f"(in {path} on {place.host})"
        return log_tail(path, place.log_start)


def _what_ended_it(error: Exception) -> str:
    # The details are below a table of ids, and end in advice on causes that Ray does not know either.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__
