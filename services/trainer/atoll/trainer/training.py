"""RUNNING: the family drives the workers through the job's optimizer steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from atoll.families.catalog import AnyFamily
from atoll.families.steps import TrainStep
from atoll.trainer.backend import FamilyBinding, StepRefused, StepReport, TrainingBackend
from atoll.trainer.schedule import RateSchedule


@dataclass
class JobWorkers:
    """The worker groups as one job's family sees them (`atoll.families.driver.WorkerGroups`)."""

    backend: TrainingBackend
    binding: FamilyBinding
    schedule: RateSchedule
    reports: list[StepReport] = field(default_factory=list)

    def train_actor(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        # Asked of the optimizer, which a checkpoint brings back: a count of the driver's own could differ from it.
        rates = self.schedule.rates(self.backend.steps_taken(), len(steps))
        return self._train(lambda: self.backend.train(self.binding, steps, rates))

    def train_critic(self, steps: Sequence[TrainStep]) -> Sequence[Mapping[str, float]]:
        return self._train(lambda: self.backend.train_critic(self.binding, steps))

    def compute_advantages(self, steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
        return self.backend.compute_advantages(self.binding, steps)

    def _train(self, call: Callable[[], StepReport]) -> Sequence[Mapping[str, float]]:
        before = sum(len(report.metrics) for report in self.reports)
        try:
            report = call()
        except StepRefused as refusal:
            # Also steps of the other model are in the workers' memory.
            raise StepRefused(refusal.message, refusal.sample_ids, refusal.steps_taken + before) from refusal
        self.reports.append(report)
        return report.metrics


def train_steps(
    backend: TrainingBackend,
    family: AnyFamily,
    binding: FamilyBinding,
    schedule: RateSchedule,
    steps: Sequence[TrainStep],
) -> Mapping[str, float]:
    """Trains and returns the job's metrics: means over its optimizer steps, and the workers' seconds.

    Blocks until the last step is applied. Raises BackendCrashed, StepRefused.
    """
    workers = JobWorkers(backend, binding, schedule)
    per_step = family.train(workers, steps)
    # A name with a group of its own, such as critic/loss, keeps it.
    metrics = {name if "/" in name else f"train/{name}": value for name, value in mean_of_steps(per_step).items()}
    for report in workers.reports:
        for phase, seconds in report.seconds.items():
            name = f"perf/workers_{phase}_seconds"
            metrics[name] = metrics.get(name, 0.0) + seconds
    return metrics


def mean_of_steps(per_step: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The mean of each metric over the steps that report it."""
    names = dict.fromkeys(name for metrics in per_step for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in per_step if name in metrics])) for name in names}
