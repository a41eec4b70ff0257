"""Drives open batches through the trainer, one at a time per scenario, and settles them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScenarioTraining:
    """Example: ScenarioTraining("math", open_batches=1, pending_reports=3, job_id="job-1a...", job_state="running",
    last_error="", head_number=2, weight_version="1:2")"""

    scenario: str
    open_batches: int
    pending_reports: int
    job_id: str
    """The job that is being driven; empty when none."""
    job_state: str
    last_error: str
    """Why the last job made no version, or why the trainer does not answer; empty when all is well."""
    head_number: int | None
    weight_version: str | None


@dataclass(frozen=True)
class TrainingStatus:
    """Example: TrainingStatus(scenarios=(...,))"""

    scenarios: tuple[ScenarioTraining, ...]


class TrainingQueue:
    """Runs in the background for as long as the gateway runs."""

    async def status(self) -> TrainingStatus:
        """What /atoll/status shows."""
        raise NotImplementedError
