"""Notices that a client hung up while its request is being answered."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Raised when the client closed its connection before the work was done."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; when the client hangs up first, `work` is cancelled and ClientGone raised.

    receive: the request's, whose body has been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
