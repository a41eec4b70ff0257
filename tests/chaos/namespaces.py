"""Services as if on hosts of their own: one network namespace each, a link between any two, links that can be cut.

Needs the right to make network namespaces: run the program under `unshare --user --map-root-user --net`, or as root.
"""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

HUB = "hub"
"""The namespace of this process: it has no holder."""


def may_make_namespaces() -> bool:
    """Whether this machine lets us."""
    tools = [shutil.which(tool) for tool in ("unshare", "ip", "nsenter")]
    return None not in tools and subprocess.run(in_own_network(["ip", "link"]), capture_output=True).returncode == 0


def in_own_network(command: Sequence[str]) -> list[str]:
    """The command in a network of its own, in which it may do everything."""
    return ["unshare", "--user", "--map-root-user", "--net", *command]


@dataclass
class Hosts:
    """Namespaces by name, "hub" for the one of this process; every host has one address, on its loopback.

    Use as a context manager in a process that `in_own_network` started.
    """

    names: Sequence[str]
    _holders: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __enter__(self) -> "Hosts":
        sleeper = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
        for name in self.names:
            if name != HUB:
                # It ends with this process, whatever happens: its input is closed then.
                holder = subprocess.Popen(["unshare", "--net", *sleeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert holder.stdout is not None and holder.stdout.readline(), "no namespace"
                self._holders[name] = holder
            self._ip(name, "link", "set", "lo", "up")
            self._ip(name, "address", "add", f"{self.address(name)}/32", "dev", "lo")
        for one, other in itertools.combinations(self.names, 2):
            self._connect(one, other)
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def enter(self, name: str) -> Sequence[str]:
        """What a command starts with to run on a host."""
        if name == HUB:
            return ()
        nsenter = shutil.which("nsenter")
        assert nsenter is not None
        return (nsenter, f"--net=/proc/{self._holders[name].pid}/ns/net")

    def cut(self, one: str, other: str) -> None:
        """From now on packets between the two vanish, without a word to either."""
        self._ip(HUB, "link", "set", self._switch(one, other), "down")

    def heal(self, one: str, other: str) -> None:
        """Packets flow again."""
        self._ip(HUB, "link", "set", self._switch(one, other), "up")

    def _connect(self, one: str, other: str) -> None:
        # Over a switch of their own, so that a cut takes the carrier from neither end.
        switch = self._switch(one, other)
        self._ip(HUB, "link", "add", switch, "type", "bridge", "forward_delay", "0")
        for here, there in ((one, other), (other, one)):
            end, port = f"{switch}to{self.names.index(there)}", f"{switch}port{self.names.index(here)}"
            self._ip(HUB, "link", "add", end, "type", "veth", "peer", "name", port)
            self._ip(HUB, "link", "set", port, "master", switch, "up")
            if here != HUB:
                self._ip(HUB, "link", "set", end, "netns", str(self._holders[here].pid))
            self._ip(here, "link", "set", end, "up")
            self._ip(here, "route", "add", self.address(there), "dev", end, "src", self.address(here))
        self.heal(one, other)

    def _switch(self, one: str, other: str) -> str:
        numbers = sorted((self.names.index(one), self.names.index(other)))
        return "s{}{}".format(*numbers)

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run([*self.enter(name), "ip", *arguments], check=True)
