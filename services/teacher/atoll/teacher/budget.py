"""A bound on the memory of one call."""

import asyncio


class Budget:
    """`await budget.take(n)` waits until n bytes are free; `budget.give_back(n)` frees them.

    For one taker at a time: a second one would have no place in a line. More than the whole budget takes all of it.
    Example: budget = Budget(64 << 20); await budget.take(4096)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._freed = asyncio.Event()

    @property
    def taken(self) -> int:
        return self._size - self._free

    async def take(self, amount: int) -> None:
        needed = min(amount, self._size)
        while self._free < needed:
            self._freed.clear()
            await self._freed.wait()
        self._free -= needed

    def give_back(self, amount: int) -> None:
        self._free += min(amount, self._size)
        self._freed.set()
