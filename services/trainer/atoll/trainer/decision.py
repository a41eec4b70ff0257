"""What to do next with a training job: one pure function of what is known, asked again after every step.

```
          committed? ----------------------------------> ADOPT  (also when another trainer made it)
          crashed max_attempts times? -----------------> FAIL
LOAD_HEAD --> TRAIN --> STAGE --> COMMIT --> (committed: ADOPT)
    ^-- memory is not the head     |
    +----- the head moved meanwhile: what was trained is worth nothing
```
"""

from dataclasses import dataclass
from enum import Enum, auto

from atoll.trainer.chain import ChainVersion


class Action(Enum):
    """The next step of a job."""

    ADOPT = auto()
    """The chain has the job: take its version over and end."""
    FAIL = auto()
    """It crashed too often."""
    DISCARD = auto()
    """What was trained has a parent that is no longer the head: forget it."""
    LOAD_HEAD = auto()
    """The workers do not hold the head, untouched."""
    TRAIN = auto()
    """Pull, admit, score, prepare, and take the optimizer steps."""
    STAGE = auto()
    """Write and seal the artifacts of the trained weights."""
    COMMIT = auto()
    """Append the version."""


@dataclass(frozen=True)
class Situation:
    """What is known about a job. Example: Situation(None, head, loaded=7, trained_from=7, staged=False, crashes=0)."""

    committed: ChainVersion | None
    """What the registry answers for the job's id."""
    head: ChainVersion
    loaded: int | None
    """The version whose weights and optimizer the workers hold, untouched; None when they hold anything else."""
    trained_from: int | None
    """The version that the job's finished steps started from; None before they are finished."""
    staged: bool
    """Whether the trained weights are sealed."""
    crashes: int
    """How often the workers were lost while they worked on this job."""
    max_attempts: int = 3


def next_action(known: Situation) -> Action:
    """The one thing to do now."""
    if known.committed is not None:
        return Action.ADOPT
    if known.crashes >= known.max_attempts:
        return Action.FAIL
    if known.trained_from is not None:
        if known.trained_from != known.head.number:
            return Action.DISCARD
        return Action.COMMIT if known.staged else Action.STAGE
    if known.loaded != known.head.number:
        return Action.LOAD_HEAD
    return Action.TRAIN
