"""What a rank refuses without being lost. Free of torch: the driver's process reads it too."""

from __future__ import annotations

from atoll.trainer.workers.group import WorkerRefusal


class NotFinite(WorkerRefusal):
    """Raised on every rank when some rank's loss or gradient is not finite; the step was not taken."""

    def __init__(self, sample_ids: tuple[str, ...], steps_taken: int) -> None:
        super().__init__(sample_ids, steps_taken)
        self.sample_ids = sample_ids
        self.steps_taken = steps_taken


class FamilyRefused(WorkerRefusal):
    """Raised on every rank when a family's hook refuses what it was given. Steps may have been taken before."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field


class WriteFailed(WorkerRefusal):
    """Raised on every rank when some rank could not write a file. Weights and optimizer are as they were."""

    def __init__(self, number: int, message: str, path: str) -> None:
        super().__init__(number, message, path)
        self.number = number
        """errno"""
        self.message = message
        self.path = path
