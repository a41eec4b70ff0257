"""Stages onto filesystems that fill up sooner and later, with two real ranks. Run in a mount namespace of its own:

unshare -Urm python -m tests.trainer.full_disk <layout> <model> <work directory>    prints what happened as JSON
"""

import errno
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from atoll.trainer.backend import BackendCrashed
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import AdamW, MegatronSettings, ParallelLayout
from atoll.trainer.workers.local import LocalWorkerGroup

from tests.trainer.megatron_support import grpo_binding, grpo_steps, make_rows

PAGE = 4096
LAYOUTS = {"TP2": ParallelLayout(tensor=2), "DP2": ParallelLayout(data=2), "PP2": ParallelLayout(pipeline=2)}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def pages(files: dict[str, bytes]) -> int:
    return sum(-(-len(data) // PAGE) for data in files.values())


def main(layout: str, model: Path, directory: Path) -> None:
    backend = MegatronBackend(
        MegatronSettings(LAYOUTS[layout], optimizer=AdamW()), LocalWorkerGroup, directory / "logs"
    )
    backend.load(model, None, None)
    binding = grpo_binding(use_rollout_log_probs=True)
    backend.train(binding, grpo_steps(make_rows(), binding), [1e-2])
    undisturbed = directory / "undisturbed"
    undisturbed.mkdir()
    stage = partial(stage_into, backend)
    stage(undisturbed)
    expected = contents(undisturbed)
    needed = pages(expected)

    small = directory / "small"
    small.mkdir()
    failures: list[str] = []
    # The check of the room before anything is written would spare us all of this.
    roomy = shutil.disk_usage(directory)._replace(free=1 << 60)
    asked = shutil.disk_usage
    shutil.disk_usage = lambda path: roomy
    group = backend._group
    for size in [*range(8, needed, max(1, needed // 24)), *range(needed - 6, needed)]:
        remount(small, size)
        try:
            stage(small)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            assert backend.healthy() and backend._group is group
            assert list(small.iterdir()) == [], "something stays of what could not be written"
            failures.append(Path(error.filename).name)
    remount(small, 2 * needed)
    stage(small)
    found = contents(small)
    differing = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    shutil.disk_usage = asked
    remount(small, 64)
    try:
        stage(small)
        early = "written"
    except OSError as error:
        early = str(error)
    backend.close()
    # Workers write a first file when they start, into their scratch directory.
    remount(small, 3)
    cramped = MegatronBackend(MegatronSettings(LAYOUTS[layout]), LocalWorkerGroup, small)
    try:
        cramped.load(model, None, None)
        start = "started"
    except BackendCrashed as crash:
        start = crash.what
    cramped.close()
    print(
        json.dumps({"failures": failures, "differing": differing, "files": len(found), "early": early, "start": start})
    )


def stage_into(backend: MegatronBackend, directory: Path) -> None:
    backend.stage(directory / "model", directory / "checkpoint", b"state of the driver")


def remount(directory: Path, size_in_pages: int) -> None:
    """A fresh filesystem of this many pages, besides those of its own directories."""
    subprocess.run(["umount", "-q", directory], check=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_in_pages * PAGE}", "tmpfs", directory], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
