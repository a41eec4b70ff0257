"""Bearer tokens. One token for everything for now; its absence is allowed on loopback only."""

import hmac
import ipaddress

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, BadConfiguration


def check_token(header: str | None, token: str | None) -> None:
    """Compares an `Authorization` value with the expected token in constant time.

    header: e.g. "Bearer s3cret", None when absent. token: None switches the check off.
    Raises AtollError(UNAUTHENTICATED).
    """
    if token is None:
        return
    scheme, _, given = (header or "").partition(" ")
    right_token = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not right_token:
        raise AtollError(
            "the request needs the header `Authorization: Bearer <token>` with the token of this deployment",
            reason=errors_pb2.REASON_UNAUTHENTICATED,
            field="authorization",
        )


def is_loopback(host: str) -> bool:
    """Whether a listen address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_open_listener(host: str, token: str | None, setting: str) -> None:
    """Raises BadConfiguration for a listener that others can reach and that asks for no token."""
    if token is None and not is_loopback(host):
        raise BadConfiguration(
            f"{setting} is {host!r}, which other machines can reach, and ATOLL_TOKEN is not set: set a token or "
            "listen on 127.0.0.1",
            field=setting,
        )
