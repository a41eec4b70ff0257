"""`python -m atoll.gateway`: settings from ATOLL_GATEWAY_*."""

from atoll.common.server import run_service
from atoll.gateway.serve import run_gateway
from atoll.gateway.settings import GatewaySettings

run_service("gateway", GatewaySettings, run_gateway)
