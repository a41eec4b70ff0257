"""Waiting for an event, and not for ever."""

import asyncio


async def set_or_after(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, or after that time. Not `asyncio.wait_for`, which may lose a cancellation."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
