import socket
from pathlib import Path

import pytest
from atoll.cli import ports
from atoll.cli.ports import free_ports


def test_ports_are_different_and_can_be_bound() -> None:
    found = free_ports(5)
    assert len(set(found)) == 5
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_ports_stay_clear_of_those_that_outgoing_connections_take() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_ports(20)) < first


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken, free) = free_ports(2)
    monkeypatch.setattr(ports, "STEADY_PORTS", [taken, free])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        assert free_ports(1) == [free]
