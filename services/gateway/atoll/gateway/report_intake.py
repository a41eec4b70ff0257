"""Takes reports: one transaction checks, records, and forms the batch that a report completes."""

from atoll.gateway.records import NewReport, ReportAnswer


class ReportIntake:
    """The same for HTTP and gRPC."""

    async def create(self, report: NewReport) -> ReportAnswer:
        """Records a report. Nothing is stored on a refusal.

        Raises what ReportService.CreateReport lists.
        """
        raise NotImplementedError
