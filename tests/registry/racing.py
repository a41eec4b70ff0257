"""One of two processes on the same database: `python -m tests.registry.racing DIRECTORY BASE DATABASE`.

Each line on standard input is one call; answered with what it returned or the refusal:

    commit <job> <parent> <model digest> <sample> <token>   the version
    acquire <holder>                                        the holder that has the lease, and its token
    release <holder>
    record <job> <token>                                    the record's position
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from atoll.common.errors import AtollError
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase, JobProgress, TrainingBody

from tests.registry.material import SCENARIO, content, settings_for

TTL = timedelta(hours=1)


def commit(registry: Registry, job: str, parent: str, digest: str, sample: str, token: str) -> str:
    wanted = content(int(parent), digest, job_id=job, consumed_sample_ids=(sample,))
    return str(registry.chain.commit(wanted, int(token)).number)


def acquire(registry: Registry, holder: str) -> str:
    lease = registry.leases.acquire(SCENARIO, "trainer", holder, f"{holder}:1", TTL)
    return f"{lease.holder} {lease.fencing_token}"


def release(registry: Registry, holder: str) -> str:
    registry.leases.release(SCENARIO, "trainer", holder)
    return "released"


def record(registry: Registry, job: str, token: str) -> str:
    body = TrainingBody("grpo", {}, (f"sample-of-{job}",))
    return str(registry.job_records.put(SCENARIO, job, body, JobProgress(JobPhase.RECORDED), int(token)).position)


CALLS: dict[str, Callable[..., str]] = {"commit": commit, "acquire": acquire, "release": release, "record": record}

if __name__ == "__main__":
    registry = Registry(settings_for(Path(sys.argv[1]), base=Path(sys.argv[2]), database_url=sys.argv[3]))
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            print(CALLS[name](registry, *arguments), flush=True)
        except AtollError as error:
            print(error.code, flush=True)
