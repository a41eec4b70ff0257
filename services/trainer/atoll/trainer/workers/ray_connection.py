"""This process's connection to Ray: to a cluster that runs, or to a private one that goes with the connection."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray
from atoll.trainer.workers.scratch import Scratch


class RayConnection:
    """Joins Ray at ``address``, or starts one on this machine, with ``cpus``, where that is None.

    A connection that this process already has is used and left as it is. Raises what `ray.init` raises.
    """

    def __init__(self, address: str | None, namespace: str, cpus: int) -> None:
        self._owned = not ray.is_initialized()
        self._directory: Scratch | None = None
        if not self._owned:
            return
        if address is not None:
            ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
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
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the cluster; a private one ends. Idempotent."""
        if self._owned:
            self._owned = False
            ray.shutdown()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
