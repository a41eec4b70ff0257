"""Runs a stack: starts its services, waits until each can be used, does a piece of work, and stops them all.

    await run_stack(stack, body)        # body runs while every service is up; its result is returned

The first service that dies or is not ready in time ends everything; the error carries the last lines of its log.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from atoll.cli.processes import ServiceProcess, hold_run_dir
from atoll.cli.ready import NotReady, is_taken, wait_until_ready
from atoll.cli.stack_file import Stack
from atoll.common.errors import BadConfiguration

T = TypeVar("T")

DEATH_NOTICE_SECONDS = 1.0
"""A lost connection may be seen before the death that caused it."""


class StackFailed(Exception):
    """Raised when a service died or was not ready in time; everything was stopped. The message is for people."""

    def __init__(self, name: str, what: str, log: Path, last_lines: str) -> None:
        super().__init__(f"{name} {what}\n--- last lines of {log}\n{last_lines}\n---")
        self.service = name


@dataclass(frozen=True)
class StackEvent:
    """Something that happened. Example: StackEvent("engine", "ready", 23.4)."""

    service: str
    what: Literal["starting", "ready", "stopping", "stopped"]
    seconds: float


Notify = Callable[[StackEvent], None]


async def run_stack(stack: Stack, body: Callable[[], Awaitable[T]], notify: Notify = lambda _: None) -> T:
    """Starts the services, runs `body` once all are ready, stops them in reverse; returns what `body` returned.

    notify: told about every start, readiness and stop, seconds counted from the start of that phase.
    Raises BadConfiguration before anything is started when the run directory or an address is taken, StackFailed when
    a service died or was not ready in time, and whatever `body` raises.
    """
    with hold_run_dir(stack.run_dir):
        await _refuse_taken_addresses(stack)
        ready_file = stack.run_dir / "ready"
        ready_file.unlink(missing_ok=True)
        running = _Running(stack, notify)

        async def work() -> T:
            await running.start_all()
            ready_file.write_text(f"{os.getpid()}\n")
            return await body()

        task = asyncio.create_task(work())
        try:
            waited: set[asyncio.Future[T] | asyncio.Future[None]] = {task, running.failure}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:
                await asyncio.wait({running.failure}, timeout=DEATH_NOTICE_SECONDS)
            if running.failure.done():
                # A body often fails because a service died: the death is the cause worth telling.
                raise running.failure.exception() or AssertionError("a failure without an error")
            return task.result()
        finally:
            ready_file.unlink(missing_ok=True)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            await running.stop_all()


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels the current task; further ones do not disturb it while it stops things."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    cancelled = False

    def cancel() -> None:
        nonlocal cancelled
        if not cancelled:
            cancelled = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _refuse_taken_addresses(stack: Stack) -> None:
    problems = [
        f"  services.{name}.ready: something already listens on {address}; stop it, or choose another port"
        for name, service in stack.services.items()
        if service.ready is not None and (address := await is_taken(service.ready))
    ]
    if problems:
        raise BadConfiguration("the stack cannot start\n" + "\n".join(problems))


class _Running:
    """The services of a stack while they run."""

    def __init__(self, stack: Stack, notify: Notify) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stack = stack
        self._notify = notify
        self._launches: dict[str, asyncio.Task[ServiceProcess]] = {}
        self._ready = {name: asyncio.Event() for name in stack.services}
        self._watches: set[asyncio.Task[None]] = set()

    async def start_all(self) -> None:
        """Returns when every service is ready."""
        starts: list[Coroutine[None, None, None]] = [self._start(name) for name in self._stack.services]
        await asyncio.gather(*starts)

    async def _start(self, name: str) -> None:
        service = self._stack.services[name]
        for other in self._stack.prerequisites(name):
            await self._ready[other].wait()
        began = time.monotonic()
        self._notify(StackEvent(name, "starting", 0.0))
        environment = service.environment(os.environ)
        launch = asyncio.create_task(ServiceProcess.start(name, service, self._stack.run_dir, environment))
        self._launches[name] = launch
        # A start that is interrupted half-way must still be known to stop_all.
        process = await asyncio.shield(launch)
        self._watches.add(asyncio.create_task(self._watch(process)))
        if service.ready is not None:
            try:
                await wait_until_ready(service.ready, environment, service.ready_timeout)
            except NotReady as error:
                self._fail(process, f"is {error}")
                # The failure ends the stack; until then nothing that needs this service may start.
                await asyncio.Event().wait()
        self._notify(StackEvent(name, "ready", time.monotonic() - began))
        self._ready[name].set()

    async def _watch(self, process: ServiceProcess) -> None:
        status = await process.exit_status()
        self._fail(process, f"ended with status {status}")

    def _fail(self, process: ServiceProcess, what: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(StackFailed(process.name, what, process.log, process.last_lines()))

    async def stop_all(self) -> None:
        """Every service stops as soon as those that need it have stopped; returns when nothing is left."""
        for watch in self._watches:
            watch.cancel()
        stopped = {name: asyncio.Event() for name in self._launches}

        async def stop(name: str) -> None:
            for other, event in stopped.items():
                if name in self._stack.prerequisites(other):
                    await event.wait()
            began = time.monotonic()
            self._notify(StackEvent(name, "stopping", 0.0))
            process = await self._launches[name]
            await process.stop()
            self._notify(StackEvent(name, "stopped", time.monotonic() - began))
            stopped[name].set()

        await asyncio.gather(*(stop(name) for name in reversed(list(self._launches))))
        if self.failure.done():
            # Read once, so that asyncio does not report an exception nobody looked at.
            self.failure.exception()
