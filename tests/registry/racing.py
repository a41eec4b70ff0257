"""One of two processes that commit to the same database: `python -m tests.registry.racing DIRECTORY BASE DATABASE`.

Each line on standard input is `<job> <parent> <model digest> <sample>`; answered with the version or the refusal.
"""

import sys
from pathlib import Path

from atoll.common.errors import AtollError
from atoll.registry.app import Registry

from tests.registry.material import content, settings_for

if __name__ == "__main__":
    registry = Registry(settings_for(Path(sys.argv[1]), base=Path(sys.argv[2]), database_url=sys.argv[3]))
    print("ready", flush=True)
    for line in sys.stdin:
        job, parent, digest, sample = line.split()
        wanted = content(int(parent), digest, job_id=job, consumed_sample_ids=(sample,))
        try:
            print(registry.chain.commit(wanted).number, flush=True)
        except AtollError as error:
            print(error.code, flush=True)
