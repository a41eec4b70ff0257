"""Who is next: every flow gets the same share of tokens, so that nothing waits for all of something longer.

A flow is one caller's sequences of about one length. Of the flows that have something waiting, the one that has been
served the fewest tokens is next (start-time fair queueing: Goyal, Vin, Cheng 1996).
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

SHORTEST_CLASS = 256
"""Sequences of up to so many tokens are one class of length; every further class is twice as long."""


def length_class(tokens: int) -> int:
    """0 for up to 256 tokens, 1 for up to 512, 2 for up to 1,024 and so on."""
    return max(0, (tokens - 1) // SHORTEST_CLASS).bit_length()


class FairQueue(Generic[T]):
    """Items by flow, each with its tokens.

    Example: queue.push("long", 9000, a); queue.push("short", 10, b); queue.push("short", 10, c): first the oldest flow,
    a, then b and c, and only then the next long one.
    """

    def __init__(self) -> None:
        self._flows: dict[Hashable, deque[tuple[int, T]]] = {}
        self._served: dict[Hashable, int] = {}
        self._now = 0

    def push(self, flow: Hashable, tokens: int, item: T) -> None:
        if flow not in self._flows:
            self._flows[flow] = deque()
            # A flow that was idle gets no credit for it.
            self._served[flow] = max(self._now, self._served.get(flow, 0))
        self._flows[flow].append((tokens, item))

    def head(self, alive: Callable[[T], bool]) -> T | None:
        """The next item, which stays; items that are not alive any more are dropped."""
        while self._flows:
            flow = min(self._flows, key=self._served.__getitem__)
            waiting = self._flows[flow]
            while waiting and not alive(waiting[0][1]):
                waiting.popleft()
            if waiting:
                return waiting[0][1]
            self._forget(flow)
        return None

    def pop(self) -> None:
        """Takes the item that `head` returned."""
        flow = min(self._flows, key=self._served.__getitem__)
        tokens, _ = self._flows[flow].popleft()
        self._now = self._served[flow]
        self._served[flow] += tokens
        if not self._flows[flow]:
            self._forget(flow)

    def drain(self) -> list[T]:
        """Takes all items."""
        items = [item for waiting in self._flows.values() for _, item in waiting]
        self._flows.clear()
        self._begin_anew()
        return items

    def _forget(self, flow: Hashable) -> None:
        del self._flows[flow]
        if not self._flows:
            self._begin_anew()
            return
        idle = [name for name, served in self._served.items() if name not in self._flows and served <= self._now]
        for name in idle:
            del self._served[name]

    def _begin_anew(self) -> None:
        """Nothing waits, so nobody is ahead of anybody: all start equal, and past flows are not kept for ever."""
        self._served.clear()
        self._now = 0
