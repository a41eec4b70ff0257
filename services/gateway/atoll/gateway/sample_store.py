"""Reads recorded samples."""

from collections.abc import Sequence

from atoll.gateway.records import PackedSample, Sample, SampleState


class SampleStore:
    """Every method runs its query on a worker thread."""

    async def get(self, scenario: str, receipt: str) -> PackedSample:
        """Raises NotFound(RECEIPT_NOT_FOUND), Conflict(RECEIPT_NOT_RECORDED)."""
        raise NotImplementedError

    async def page(
        self, scenario: str, state: SampleState | None, size: int, token: str
    ) -> tuple[Sequence[Sample], str]:
        """Newest first, and the token of the next page."""
        raise NotImplementedError
