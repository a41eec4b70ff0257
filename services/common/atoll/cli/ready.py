"""Asks a service whether it can be used: by command, TCP port, HTTP path or gRPC health."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import aiohttp
import grpc
from atoll.cli.stack_file import Ready
from grpc_health.v1 import health_pb2, health_pb2_grpc

POLL_SECONDS = 0.2
PROBE_SECONDS = 5.0
"""How long one probe may take: a service that is loading may accept a connection and answer late."""


class NotReady(Exception):
    """Raised when a probe fails; the message says what was seen."""


async def wait_until_ready(check: Ready, environment: Mapping[str, str], timeout: float) -> None:
    """Returns when the check passes. Raises NotReady with the last thing seen after `timeout` seconds."""
    seen = "no probe was answered"

    async def poll() -> None:
        nonlocal seen
        while True:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    return await probe(check, environment)
            except NotReady as error:
                seen = str(error)
            except TimeoutError:
                seen = f"no answer within {PROBE_SECONDS:g} s"
            await asyncio.sleep(POLL_SECONDS)

    try:
        # Not wait_for: Python 3.11's loses a cancellation that meets the end of what it waits for.
        async with asyncio.timeout(timeout):
            await poll()
    except TimeoutError:
        raise NotReady(f"not ready after {timeout:g} s; last seen: {seen}") from None


async def probe(check: Ready, environment: Mapping[str, str]) -> None:
    """One attempt. Raises NotReady."""
    probes: list[tuple[str | None, Callable[[str], Awaitable[None]]]] = [
        (check.tcp, _tcp),
        (check.http, _http),
        (check.grpc, _grpc),
    ]
    for target, ask in probes:
        if target is not None:
            return await ask(target)
    assert check.command is not None
    return await _command(check.command, environment)


async def is_taken(check: Ready) -> str | None:
    """The address of the check when something already listens there, which would answer in the service's place."""
    address = check.tcp or check.grpc
    if check.http is not None:
        parts = urlsplit(check.http)
        address = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    if address is None:
        return None
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await _tcp(address)
    except (NotReady, TimeoutError):
        return None
    return address


async def _tcp(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise NotReady(f"{address} does not accept connections ({error.strerror or error})") from None
    writer.close()


async def _http(url: str) -> None:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            if not 200 <= response.status < 300:
                raise NotReady(f"{url} answered {response.status}")
    except (aiohttp.ClientError, OSError) as error:
        raise NotReady(f"{url} does not answer ({error})") from None


async def _grpc(address: str) -> None:
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        raise NotReady(f"{address} answered {error.code().name}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise NotReady(f"{address} says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


async def _command(command: list[str], environment: Mapping[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if code != 0:
        raise NotReady(f"`{' '.join(command)}` exited with {code}")
