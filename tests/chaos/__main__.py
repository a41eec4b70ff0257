"""`make chaos`: random SIGKILLs of random processes of a running loop, and the count of what they broke.

    python -m tests.chaos --kills 200 --real-kills 12 --seed 1

The first stage kills registry, gateway, two trainers with Megatron workers, their workers and two fake engines; the
second has one real SGLang engine. The last line is `chaos: kills=<n> lost=<n> twice=<n> stuck=<n> wrong_version=<n>`;
the exit status is 1 when any of the last four is not 0, and the directory with databases and logs is kept then.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from atoll.engine.models.tiny import make_tiny

from tests.chaos.deployment import Shape
from tests.chaos.invariants import Findings
from tests.chaos.run import LEASE_TTL_S, ChaosRun, Outcome, Plan


def main() -> int:
    """Runs both stages and prints the last line."""
    parser = argparse.ArgumentParser(description="Kills processes of a running loop and checks that nothing broke.")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs with fake engines")
    parser.add_argument("--real-kills", type=int, default=12, help="SIGKILLs with a real SGLang engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where everything happens; default: a temporary one")
    arguments = parser.parse_args()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="atoll-chaos-"))
    model = make_tiny(directory / "model", 0)
    settings = {"LEASE_TTL_S": str(LEASE_TTL_S), "CHECKPOINT_EVERY_N_VERSIONS": "3"}
    fake = Shape(trainers=2, engines=2, trainer_settings=settings)
    real = Shape(real_engine=True, keep_checkpoints=40, trainer_settings=settings)
    plans = {
        "fake": Plan(arguments.kills, arguments.seed, fake),
        "real": Plan(arguments.real_kills, arguments.seed, real, pause_s=8.0, patience_s=300.0),
    }
    found, kills = Findings(), 0
    for name, plan in plans.items():
        if plan.kills:
            print(f"{name} engines: {plan.kills} kills, seed {plan.seed}", flush=True)
            outcome = asyncio.run(ChaosRun(directory / name, model, plan).execute())
            describe(outcome)
            found.add(outcome.findings)
            kills += outcome.kills.total()
    for line in found.lines():
        print(line)
    if found.any:
        print(f"kept for a look: {directory}")
    elif arguments.directory is None:
        shutil.rmtree(directory)
    print(f"chaos: kills={kills} {found.counts()}")
    return 1 if found.any else 0


def describe(outcome: Outcome) -> None:
    """What the stage saw, for people."""
    counts = [("kills", outcome.kills), ("versions", outcome.versions), ("samples", outcome.states)]
    for what, by_kind in counts:
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))
        print(f"  {what}: {by_kind.total()} ({told})")
    for end in outcome.ends:
        print(f"  ended by itself: {end[:300]}")
    print(f"  trainers stopped: {outcome.stops}, rollbacks: {outcome.rollbacks}, {outcome.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
