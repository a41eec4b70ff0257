"""Makes samples durable: concurrent requests share one transaction and its fsync."""

from atoll.gateway.records import NewSample


class SampleWriter:
    """One thread commits everything that waits in one transaction."""

    async def record(self, sample: NewSample) -> None:
        """Returns when the sample is durable and its receipt valid.

        Raises InternalError(ENGINE_PROTOCOL) for a sample that does not add up, AtollError(STORAGE_FULL), Unavailable.
        """
        raise NotImplementedError
