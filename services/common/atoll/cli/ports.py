"""Ports for services that are started on this machine."""

import random
import socket

STEADY_PORTS = range(20_000, 30_000)
"""Below the range from which Linux gives ports to outgoing connections (32768 to 60999): a port found free stays free
until its service binds it, and while a stack is down between two starts."""


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface that nobody is bound to now. Raises OSError when too few are left."""
    found: list[int] = []
    for port in random.sample(STEADY_PORTS, len(STEADY_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} free ports in {STEADY_PORTS.start}..{STEADY_PORTS.stop - 1}")
