"""Keeps a private Ray out of reach of other machines. Free of Ray, which reads the switch when it is imported."""

import os

LOOPBACK = "127.0.0.1"
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for clusters of several machines. Off, Ray knows this machine as 127.0.0.1 and listens there alone; an
address that it is given would be turned into that of the network."""


def prefer_loopback() -> None:
    """Call before Ray is imported."""
    os.environ.setdefault(CLUSTERS, "0")


def refuse_listening_to_others(address: str) -> None:
    """Raises RuntimeError when Ray knows this machine under another address than loopback."""
    if address != LOOPBACK:
        raise RuntimeError(
            f"it would listen on {address}, where others reach it; set {CLUSTERS}=0 before the "
            "process starts, or join a cluster with RAY_ADDRESS"
        )
