"""The gateway process: its parts, HTTP and gRPC side by side, and a drained stop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from atoll.common.auth import refuse_open_listener
from atoll.common.channels import open_channel
from atoll.common.errors import BadConfiguration
from atoll.common.server import wait_for_stop_signal
from atoll.gateway.app import HttpParts, build_app
from atoll.gateway.assembly import build_gateway
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.registry_reader import RegistryReader
from atoll.gateway.settings import GatewaySettings
from fastapi import FastAPI

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 20
"""How long answers in progress may take after SIGTERM; then they are cut, and nothing of them is recorded."""


class _Server(uvicorn.Server):
    """Signals are handled by run_gateway, which has more to stop than HTTP."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_gateway(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises BadConfiguration."""
    refuse_open_listener(settings.host, settings.token_text, "ATOLL_GATEWAY_HOST")
    listener = _listen(settings.host, settings.port)
    gateway = build_gateway(settings)
    registry_channel = open_channel(settings.registry, settings.token_text)
    engines = EnginePool(settings.engines, settings.request_timeout_s)
    app = build_app(HttpParts(settings, gateway, RegistryReader(registry_channel), engines))
    await gateway.start()
    await engines.start()
    server = _http_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(wait_for_stop_signal())
    log.info("gateway serves", http=f"{settings.host}:{listener.getsockname()[1]}")
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        # Answers in progress are recorded before the store closes.
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        await engines.stop()
        await registry_channel.close()
        await gateway.stop()
    log.info("gateway stopped")


def _http_server(app: FastAPI) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return _Server(config)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything else so that a port that is taken stops the start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=2048)
    except OSError as error:
        raise BadConfiguration(
            f"cannot listen on {host}:{port}: {error.strerror}", field="ATOLL_GATEWAY_PORT"
        ) from None
