"""What the runner knows of the job in hand, and how a job ends early."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.trainer.v1.job_pb2 import JobState
from atoll.families.driver import TeacherScorer
from atoll.families.signal import FamilyState
from atoll.trainer.job_families import JobFamilies, JobFamily
from atoll.trainer.job_queue import JobBody
from atoll.trainer.phases import PhaseClock
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.staging import StagedArtifacts
from atoll.trainer.trained_families import TrainedFamilies


class JobEnded(Exception):
    """Raised by a step when the job ends here, without a version."""

    def __init__(
        self, state: JobState.ValueType, reason: Reason.ValueType, message: str, sample_ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.state = state
        self.reason = reason
        self.message = message
        self.sample_ids = sample_ids


@dataclass
class Progress:
    """What this process has done for a job; forgotten with the process, and rebuilt by doing it again."""

    body: JobBody
    found_family: JobFamily | None = None
    """Known once its training begins."""
    crashes: int = 0
    restages: int = 0
    failed_loads: int = 0
    trained_from: int | None = None
    staged: StagedArtifacts | None = None
    new_state: FamilyState = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    clock: PhaseClock = field(default_factory=PhaseClock)

    @property
    def attempt(self) -> int:
        return self.crashes + 1

    @property
    def family(self) -> JobFamily:
        assert self.found_family is not None, "asked before the job's training began"
        return self.found_family

    def families_after(self, trained: TrainedFamilies) -> TrainedFamilies:
        """What the checkpoint remembers once the job has trained."""
        return self.family.after(self.new_state, trained)

    def forget_training(self) -> None:
        """The trained weights are gone or worth nothing."""
        self.trained_from, self.staged = None, None
        self.clock = PhaseClock()


@dataclass(frozen=True)
class TrainingSetup:
    """What stays the same for every job of this process."""

    families: JobFamilies
    schedule: RateSchedule
    max_staleness: int
    max_attempts: int
    teacher: TeacherScorer | None = None
    """The teacher service, where there is one."""
