"""`TrainingBackend` on a group of `MegatronRank` workers: deals rows out, gathers results, turns losses into errors."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import structlog
from atoll.common.errors import InvalidInput
from atoll.families.rows import Float32, Row
from atoll.families.steps import TrainRow, TrainStep
from atoll.trainer.backend import BackendCrashed, FamilyBinding, Loaded, StepRefused, StepReport
from atoll.trainer.megatron.architecture import Architecture, UnsupportedModel, check_divisible, read_architecture
from atoll.trainer.megatron.family_check import check_family
from atoll.trainer.megatron.refusals import FamilyRefused, NotFinite, WriteFailed
from atoll.trainer.megatron.row_plan import RowPlan, plan_rows
from atoll.trainer.megatron.settings import MegatronSettings
from atoll.trainer.workers.group import WorkerGroup, WorkerLost, WorkerPlan

_log = structlog.get_logger(__name__)
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Timeouts:
    """Seconds before a call counts as a crash and kills the workers.

    Example: ``Timeouts(start=300, load=600, step=1800, stage=600)``
    """

    start: float = 300.0
    load: float = 600.0
    step: float = 3600.0
    stage: float = 1800.0


class MegatronBackend:
    """Implements `atoll.trainer.backend.TrainingBackend`. Workers start with the first `load`, and again after a crash.

    ``launch`` makes a worker group of a plan, such as `atoll.trainer.workers.local.LocalWorkerGroup`; ``target`` is the
    class the ranks run.
    """

    def __init__(
        self,
        settings: MegatronSettings,
        launch: Callable[[WorkerPlan], WorkerGroup],
        log_directory: Path,
        timeouts: Timeouts | None = None,
        target: str = "atoll.trainer.megatron.rank:MegatronRank",
    ) -> None:
        self._settings = settings
        self._launch = launch
        self._log_directory = log_directory
        self._timeouts = timeouts or Timeouts()
        self._target = target
        self._group: WorkerGroup | None = None
        self._architecture: Architecture | None = None
        """Of the model in memory; None when there is none."""
        self._has_reference = False

    def load(
        self,
        model_directory: Path,
        checkpoint_directory: Path | None,
        reference_directory: Path | None,
        *,
        weights_from_model: bool = False,
    ) -> Loaded:
        """See `TrainingBackend.load`. Raises `UnsupportedModel` before any worker is touched."""
        architecture = read_architecture(model_directory)
        check_divisible(architecture, self._settings.layout.tensor, self._settings.layout.pipeline)
        if reference_directory is not None and (other := read_architecture(reference_directory)) != architecture:
            raise UnsupportedModel(reference_directory, "reference model", f"the actor's {architecture}", other)
        if self._group is None or not self._group.alive():
            self._start()
        directories = (model_directory, checkpoint_directory, reference_directory)
        answers = self._call_all("load", (*directories, weights_from_model), self._timeouts.load)
        self._architecture = architecture
        self._has_reference = reference_directory is not None
        return cast(Loaded, answers[0])

    def check_family(self, family: FamilyBinding) -> None:
        """See `TrainingBackend.check_family`."""
        self._check(family)
        self._call_all("check_family", (family,), self._timeouts.load)

    def steps_taken(self) -> int:
        """See `TrainingBackend.steps_taken`."""
        return cast(int, self._call_all("steps_taken", (), self._timeouts.load)[0])

    def log_probs(self, rows: Sequence[Row]) -> list[Float32]:
        """See `TrainingBackend.log_probs`."""
        return cast(list[Float32], self._of_each_row("log_probs", (), rows, [len(row.tokens) for row in rows]))

    def compute_advantages(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        """See `TrainingBackend.compute_advantages`."""
        self._check(family)
        rows = [item for step in steps for item in step.rows]
        lengths = [len(item.row.tokens) for item in rows]
        computed = iter(zip(rows, self._of_each_row("compute_advantages", (family,), rows, lengths), strict=True))
        return tuple(TrainStep(tuple(_with(*next(computed)) for _ in step.rows)) for step in steps)

    def train(self, family: FamilyBinding, steps: Sequence[TrainStep], learning_rates: Sequence[float]) -> StepReport:
        """See `TrainingBackend.train`. ``seconds`` are of the slowest rank in each phase.

        Raises `InvalidInput` for a family that this backend does not run.
        """
        if len(steps) != len(learning_rates):
            raise ValueError(f"expected a learning rate for each of {len(steps)} steps, got {len(learning_rates)}")
        self._check(family)
        return self._train("train", family, steps, (tuple(learning_rates),))

    def train_critic(self, family: FamilyBinding, steps: Sequence[TrainStep]) -> StepReport:
        """See `TrainingBackend.train_critic`."""
        self._check(family)
        return self._train("train_critic", family, steps, ())

    def _check(self, family: FamilyBinding) -> None:
        check_family(family, has_reference=self._has_reference)

    def _train(
        self, method: str, family: FamilyBinding, steps: Sequence[TrainStep], rest: tuple[object, ...]
    ) -> StepReport:
        shares: list[list[list[list[TrainRow]]]] = [[] for _ in range(self._settings.layout.data)]
        for step in steps:
            plan = self._plan([len(item.row.tokens) for item in step.rows])
            for share, mine in zip(shares, plan, strict=True):
                share.append([[step.rows[i] for i in micro_batch] for micro_batch in mine])
        arguments = [(family, shares[self._share(rank)], *rest) for rank in self._ranks()]
        reports = cast(list[StepReport], self._call(method, arguments, self._timeouts.step))
        phases = {name for report in reports for name in report.seconds}
        seconds = {name: max(report.seconds.get(name, 0.0) for report in reports) for name in sorted(phases)}
        return StepReport(reports[0].metrics, seconds)

    def _of_each_row(
        self, method: str, first: tuple[object, ...], rows: Sequence[object], lengths: Sequence[int]
    ) -> list[object]:
        """Deals rows to the copies of the model and puts their answers in the rows' order."""
        shares = [[i for micro_batch in share for i in micro_batch] for share in self._plan(lengths)]
        arguments = [(*first, [rows[i] for i in shares[self._share(rank)]]) for rank in self._ranks()]
        answers = self._call(method, arguments, self._timeouts.step)
        found: dict[int, object] = {}
        for rank in self._ranks():
            if self._settings.layout.speaks(rank):
                found |= dict(zip(shares[self._share(rank)], cast(list[object], answers[rank]), strict=True))
        return [found[i] for i in range(len(rows))]

    def stage(self, model_directory: Path | None, checkpoint_directory: Path | None, driver_state: bytes) -> None:
        """See `TrainingBackend.stage`. Nothing stays of what could not be written as a whole."""
        directories = [each for each in (model_directory, checkpoint_directory) if each is not None]
        for directory in directories:
            if directory.exists():
                raise FileExistsError(errno.EEXIST, "expected a directory that does not exist yet", str(directory))
        self._refuse_without_room(model_directory, checkpoint_directory)
        try:
            self._call_all("stage", (model_directory, checkpoint_directory, driver_state), self._timeouts.stage)
        except OSError:
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
            raise

    def healthy(self) -> bool:
        """See `TrainingBackend.healthy`."""
        return self._architecture is not None and self._group is not None and self._group.alive()

    def kill(self) -> None:
        """See `TrainingBackend.kill`."""
        self._architecture = None
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """See `TrainingBackend.close`."""
        self._architecture = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def _refuse_without_room(self, model_directory: Path | None, checkpoint_directory: Path | None) -> None:
        # Before minutes are spent on writing what does not fit.
        if self._architecture is None:
            return
        weights = self._architecture.parameters * _FLOAT32_BYTES
        needed: dict[int, int] = {}
        of_checkpoint = 0
        if checkpoint_directory is not None:
            of_checkpoint = cast(int, self._call_all("checkpoint_copies", (), self._timeouts.stage)[0])
        for directory, copies in ((model_directory, 1), (checkpoint_directory, of_checkpoint)):
            if directory is not None:
                filesystem = directory.parent.stat().st_dev
                needed[filesystem] = needed.get(filesystem, 0) + copies * weights
                free = shutil.disk_usage(directory.parent).free
                if free < needed[filesystem]:
                    message = f"{needed[filesystem]} bytes are needed and {free} are free"
                    raise OSError(errno.ENOSPC, message, str(directory))

    def _start(self) -> None:
        self.close()
        plan = WorkerPlan(
            target=self._target,
            size=self._settings.layout.world_size,
            # A collective must fail only after the call's own deadline has, which names the rank that is late.
            arguments={"settings": self._settings, "collective_timeout_s": 2 * self._timeouts.step},
            log_directory=self._log_directory,
            start_timeout_s=self._timeouts.start,
        )
        try:
            self._group = self._launch(plan)
        except WorkerLost as lost:
            raise BackendCrashed(lost.rank, lost.reason, lost.log_tail) from lost
        except WriteFailed as failure:
            raise BackendCrashed(0, f"could not write {failure.path}: {failure.message}", "") from failure
        except Exception as failure:  # Ray that is away, a process too many: no fault of the job that needs workers
            raise BackendCrashed(0, f"was not started: {failure!r}", "") from failure
        _log.info("trainer workers started", ranks=plan.size, layout=str(self._settings.layout))

    def _plan(self, lengths: Sequence[int]) -> RowPlan:
        return plan_rows(lengths, self._settings.layout.data, self._settings.micro_batch)

    def _ranks(self) -> range:
        return range(self._settings.layout.world_size)

    def _share(self, rank: int) -> int:
        return self._settings.layout.data_rank(rank)

    def _call_all(self, method: str, arguments: tuple[object, ...], timeout_s: float) -> list[object]:
        return self._call(method, [arguments for _ in self._ranks()], timeout_s)

    def _call(self, method: str, arguments: Sequence[tuple[object, ...]], timeout_s: float) -> list[object]:
        if self._group is None:
            raise RuntimeError(f"{method}: no workers run; call load first")
        try:
            return self._group.call(method, arguments, timeout_s)
        except NotFinite as refusal:
            raise _step_refused(refusal) from refusal
        except WriteFailed as failure:
            raise OSError(failure.number, failure.message, failure.path) from failure
        except FamilyRefused as refusal:
            raise InvalidInput(refusal.message, field=refusal.field) from refusal
        except WorkerLost as lost:
            self._architecture = None
            _log.error("trainer workers lost", method=method, rank=lost.rank, reason=lost.reason)
            raise BackendCrashed(lost.rank, lost.reason, lost.log_tail) from lost


def _with(item: TrainRow, computed: object) -> TrainRow:
    advantages, values, returns = cast(tuple[Float32, Float32 | None, Float32 | None], computed)
    return replace(item, advantages=advantages, values=values, returns=returns)


def _step_refused(refusal: NotFinite) -> StepRefused:
    who = f"sample {', '.join(refusal.sample_ids)}" if refusal.sample_ids else "no single sample: the gradient's sum"
    return StepRefused(
        f"optimizer step {refusal.steps_taken + 1}: the loss or its gradient is not finite at {who};"
        " expected finite numbers at every trained token; drop the sample or lower the learning rate",
        refusal.sample_ids,
        refusal.steps_taken,
    )
