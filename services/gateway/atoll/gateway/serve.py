"""The gateway process: its parts, HTTP and gRPC side by side, and a drained stop."""

import structlog
from atoll.common.server import wait_for_stop_signal
from atoll.gateway.app import build_app
from atoll.gateway.assembly import build_gateway
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.http_server import HttpServer
from atoll.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)


async def run_gateway(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises BadConfiguration."""
    # First, so that a second process on one port stops before it touches the database.
    http = HttpServer(settings.host, settings.port, settings.token_text)
    gateway = build_gateway(settings)
    engines = EnginePool(settings.engines, settings.request_timeout_s)
    try:
        await gateway.start()
        await engines.start()
        await http.start(build_app(settings, gateway, engines))
        log.info("gateway serves", http=f"{settings.host}:{http.port}", grpc_port=gateway.server.port)
        await wait_for_stop_signal()
        log.info("gateway stops")
    finally:
        # Answers in progress are recorded before the store closes.
        await http.stop()
        await engines.stop()
        await gateway.stop()
