"""A bound on tokens in flight, first come first served."""

import asyncio
from collections import deque


class TokenBudget:
    """`await budget.take(n)` waits until n tokens are free; `budget.give_back(n)` frees them.

    A sequence that is longer than the whole budget takes all of it and runs alone. Belongs to one event loop.
    """

    def __init__(self, tokens: int) -> None:
        self._size = tokens
        self._free = tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def in_flight(self) -> int:
        """Tokens taken."""
        return self._size - self._free

    async def take(self, tokens: int) -> None:
        needed = min(tokens, self._size)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((needed, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(tokens)
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
                self._serve()
            raise

    def give_back(self, tokens: int) -> None:
        self._free += min(tokens, self._size)
        self._serve()

    def _serve(self) -> None:
        # Strictly in order: a short sequence that overtakes a long one again and again would starve it.
        while self._waiting and self._waiting[0][0] <= self._free:
            needed, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= needed
                turn.set_result(None)
