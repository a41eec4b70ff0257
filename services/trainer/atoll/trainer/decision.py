"""What to do next with a job: one pure function of what is known, asked again after every step.

```
lease not held? ---------------------------> WAIT
record COMMITTED? -------------------------> ADOPT     (also when another trainer made the version)
record ended otherwise? -------------------> END
known how it ends? ------------------------> CONCLUDE  (dropped, refused, failed: recorded, then END)
no room in the store? ---------------------> DEFER     (what is trained stays in memory)
a rollback? -------------------------------> ROLL_BACK
record STAGED on the present head? --------> COMMIT    (also what an earlier process staged)

LOAD_HEAD or RECOVER --> TRAIN --> STAGE --> COMMIT --> ADOPT
    ^-- memory is not the head     |
    +----- DISCARD: the head moved, what was trained is worth nothing
```
"""

from dataclasses import dataclass
from enum import Enum, auto

from atoll.api.registry.v1 import job_record_pb2
from atoll.trainer.chain import ChainVersion
from atoll.trainer.job_records import RecordedJob


class Action(Enum):
    """The next step of a job."""

    WAIT = auto()
    """Another trainer may act, or none: wait for the lease."""
    ADOPT = auto()
    """The chain has the job: take its version over and end."""
    END = auto()
    """The registry says how it ended without a version."""
    CONCLUDE = auto()
    """Record how it ends without a version."""
    DEFER = auto()
    """Wait for room in the store."""
    ROLL_BACK = auto()
    """Append the version that brings an earlier one back."""
    COMMIT = auto()
    """Append the version that the record holds ready."""
    STAGE = auto()
    """Write, seal and record the artifacts of the trained weights."""
    DISCARD = auto()
    """What was trained has a parent that is no longer the head: forget it."""
    FAIL = auto()
    """It crashed too often."""
    RECOVER = auto()
    """The head lived in a memory that is gone: append the version that goes on from the newest checkpoint."""
    LOAD_HEAD = auto()
    """The workers do not hold the head, untouched."""
    TRAIN = auto()
    """Pull, admit, score, prepare, and take the optimizer steps."""


@dataclass(frozen=True)
class Memory:
    """What this process holds, and loses when it dies. Example: Memory(loaded=7)."""

    loaded: int | None = None
    """The version whose weights and optimizer the workers hold, untouched; None when they hold anything else."""
    begun: int = 0
    """The attempt whose steps are being taken or were taken here; 0 when there is none or its workers died."""
    trained_from: int | None = None
    """The version that the job's finished steps started from; None before they are finished."""
    staged_is_gone: bool = False
    """The commit found that the bytes which the record holds ready are not there any more."""
    ends: bool = False
    """Known to end without a version."""
    no_room: bool = False
    """The store was found full."""
    lost_early: int = 0
    """How often the job killed the workers before its steps were begun, which no record counts."""


@dataclass(frozen=True)
class Situation:
    """What is known about a job. Example: Situation(record, head, Memory(loaded=7), is_holder=True, max_attempts=3)."""

    record: RecordedJob
    head: ChainVersion
    memory: Memory
    is_holder: bool = True
    max_attempts: int = 3


def decide(known: Situation) -> Action:
    """The one thing to do now."""
    record, memory = known.record, known.memory
    if not known.is_holder:
        return Action.WAIT
    if record.phase == job_record_pb2.JOB_PHASE_COMMITTED:
        return Action.ADOPT
    if not record.is_open:
        return Action.END
    if memory.ends:
        return Action.CONCLUDE
    if memory.no_room:
        return Action.DEFER
    if record.body.restores is not None:
        return Action.ROLL_BACK
    if record.staged is not None and record.staged.parent == known.head.number and not memory.staged_is_gone:
        return Action.COMMIT
    if memory.trained_from is not None:
        return Action.STAGE if memory.trained_from == known.head.number else Action.DISCARD
    if crashes(record, memory.begun) + memory.lost_early >= known.max_attempts:
        return Action.FAIL
    return Action.TRAIN if memory.loaded == known.head.number else to_hold(known.head)


def to_hold(head: ChainVersion) -> Action:
    """How workers that do not hold the head come to hold one."""
    return Action.LOAD_HEAD if head.durable else Action.RECOVER


def crashes(record: RecordedJob, begun: int) -> int:
    """How many attempts died. An attempt that is staged, or lives in this memory (`begun`), did not."""
    lives = record.phase == job_record_pb2.JOB_PHASE_STAGED
    if record.phase == job_record_pb2.JOB_PHASE_RUNNING:
        lives = begun == record.attempt
    return max(0, record.attempt - 1) if lives else record.attempt
