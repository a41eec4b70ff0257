"""This process's connection to Ray: to a cluster that runs, or to a private one that goes with the connection."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from atoll.trainer.workers.ray_bridge import Bridge, publish_bridge
from atoll.trainer.workers.ray_loopback import refuse_listening_to_others
from atoll.trainer.workers.scratch import Scratch

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class RayConnection:
    """Joins Ray at ``address``, or starts one on this machine, with ``cpus``, where that is None.

    A joined cluster gets this driver's ``bridge``; a private Ray must be out of reach of other machines.
    A connection that this process already has is used and left as it is.

    Raises what `ray.init` and `publish_bridge` raise, RuntimeError for a private Ray that would listen to others.
    """

    def __init__(self, address: str | None, namespace: str, cpus: int, bridge: Bridge | None = None) -> None:
        self._owned = not ray.is_initialized()
        self._directory: Scratch | None = None
        self._bridge: ActorHandle | None = None
        if not self._owned:
            return
        if address is not None:
            ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
            if bridge is not None:
                self._publish(bridge)
            return
        # Ray's sockets lie in its directory, and their names must stay short: not under the run directory.
        self._directory = Scratch.make(Path(tempfile.gettempdir()), "atoll-ray-")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._directory.path),
            )
            refuse_listening_to_others(ray.util.get_node_ip_address())
        except BaseException:
            self.close()
            raise

    def _publish(self, bridge: Bridge) -> None:
        try:
            self._bridge = publish_bridge(bridge)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the cluster; a private one ends. Idempotent."""
        if self._owned:
            self._owned, self._bridge = False, None
            ray.shutdown()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
