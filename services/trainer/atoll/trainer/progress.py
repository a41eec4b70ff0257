"""What the runner knows of the job in hand, and how a job ends early."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.families.driver import TeacherScorer
from atoll.families.signal import FamilyState
from atoll.trainer.decision import Memory
from atoll.trainer.job_families import JobFamilies, JobFamily
from atoll.trainer.job_queue import JobBody
from atoll.trainer.phases import PhaseClock
from atoll.trainer.schedule import RateSchedule
from atoll.trainer.staging import StagedArtifacts
from atoll.trainer.trained_families import TrainedFamilies


class JobEnded(Exception):
    """Raised by a step when the job ends here, without a version, in a final phase."""

    def __init__(
        self, phase: JobPhase.ValueType, reason: Reason.ValueType, message: str, sample_ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.reason = reason
        self.message = message
        self.sample_ids = sample_ids


class LookAgain(Exception):
    """Raised by a step when the registry has moved on: what was decided does not hold any more."""


@dataclass
class Progress:
    """What this process has done for a job; forgotten with the process, and rebuilt by doing it again."""

    body: JobBody
    found_family: JobFamily | None = None
    """Known once its training begins."""
    begun: int = 0
    """The attempt whose steps this memory takes or took; 0 for none."""
    lost_early: int = 0
    """How often the workers died under it before its steps were begun."""
    restages: int = 0
    trained_from: int | None = None
    unmoved_model: str = ""
    """Digest of the parent's model where no step moved the actor's weights: it is the new version's as well."""
    staged: StagedArtifacts | None = None
    staged_is_gone: bool = False
    ending: JobEnded | None = None
    no_room: str = ""
    """What the store said when it was full."""
    new_state: FamilyState = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    clock: PhaseClock = field(default_factory=PhaseClock)

    @property
    def family(self) -> JobFamily:
        assert self.found_family is not None, "asked before the job's training began"
        return self.found_family

    def families_after(self, trained: TrainedFamilies) -> TrainedFamilies:
        """What the checkpoint remembers once the job has trained."""
        return self.family.after(self.new_state, trained)

    def memory(self, loaded: int | None) -> Memory:
        """What `decide` needs of it."""
        return Memory(
            loaded=loaded,
            begun=self.begun,
            trained_from=self.trained_from,
            staged_is_gone=self.staged_is_gone,
            ends=self.ending is not None,
            no_room=bool(self.no_room),
            lost_early=self.lost_early,
        )

    def forget_training(self) -> None:
        """The trained weights are worth nothing."""
        self.trained_from, self.staged = None, None
        self.clock = PhaseClock()

    def lose_memory(self) -> None:
        """The workers are gone, and with them the attempt."""
        self.forget_training()
        self.lost_early += not self.begun
        self.begun = 0


@dataclass(frozen=True)
class TrainingSetup:
    """What stays the same for every job of this process."""

    families: JobFamilies
    schedule: RateSchedule
    max_staleness: int
    max_attempts: int
    checkpoint_every_n_versions: int = 1
    teacher: TeacherScorer | None = None
    """The teacher service, where there is one."""

    def is_checkpoint(self, number: int) -> bool:
        """Whether the version of this number keeps all that training goes on from; the others are live."""
        return number % self.checkpoint_every_n_versions == 0
