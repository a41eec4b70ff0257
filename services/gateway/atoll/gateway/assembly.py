"""The gateway without its HTTP side: what is built once, started, and stopped in reverse."""

from dataclasses import dataclass

from atoll.gateway.receipts import Receipts
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_store import SampleStore
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.settings import GatewaySettings
from atoll.gateway.training_queue import TrainingQueue


@dataclass(frozen=True)
class Gateway:
    """What the HTTP side calls.

    receipts.issue(scenario) -> receipt                  before the stream starts
    await writer.record(NewSample)                       returns when the sample is durable
    await reports.create(NewReport) -> ReportAnswer
    await samples.get(scenario, receipt) -> PackedSample
    await scenarios.get(scenario) -> BoundScenario       SCENARIO_NOT_FOUND, SERVICE_UNAVAILABLE
    await scenarios.list() -> list[BoundScenario]
    scenarios.head(scenario) -> Head | None              the newest version as last heard
    await training.status() -> TrainingStatus            queue, last training error, heads
    """

    receipts: Receipts
    writer: SampleWriter
    reports: ReportIntake
    samples: SampleStore
    scenarios: ScenarioDirectory
    training: TrainingQueue

    async def start(self) -> None:
        """Serves gRPC and takes up open batches."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Drains: calls in progress end, every accepted sample is stored."""
        raise NotImplementedError


def build_gateway(settings: GatewaySettings) -> Gateway:
    """Opens the database (migrating it forward). Call it in a running event loop. Raises BadConfiguration."""
    raise NotImplementedError
