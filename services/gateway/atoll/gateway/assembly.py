"""The gateway without its HTTP side: what is built once, started, and stopped in reverse."""

from dataclasses import dataclass

import grpc
import structlog
from atoll.api.gateway.v1 import report_service_pb2_grpc, sample_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError
from atoll.common.server import GrpcServer
from atoll.gateway import rpc_reports, rpc_samples
from atoll.gateway.batch_forming import BatchForming
from atoll.gateway.database import Database
from atoll.gateway.pending_reports import PendingReports
from atoll.gateway.receipts import Receipts
from atoll.gateway.report_intake import ReportIntake
from atoll.gateway.sample_store import SampleStore
from atoll.gateway.sample_writer import SampleWriter
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.settings import GatewaySettings
from atoll.gateway.trainer_client import TrainerClient
from atoll.gateway.trainers import Trainers, trainer_addresses
from atoll.gateway.training_queue import TrainingQueue

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Gateway:
    """What the HTTP side calls.

    receipts.issue(scenario) -> receipt                  before the stream starts
    await writer.record(NewSample)                       returns when the sample is durable
    await reports.create(NewReport) -> ReportAnswer
    await samples.get(scenario, receipt) -> PackedSample
    await scenarios.get(scenario) -> BoundScenario       SCENARIO_NOT_FOUND, SERVICE_UNAVAILABLE
    await scenarios.list() -> list[BoundScenario]        and scenarios.failed() -> {scenario: why}
    scenarios.head(scenario) -> Head | None              the newest version as last heard
    await training.status() -> TrainingStatus            queue, last training error, heads
    registry                                             the channel, for other calls of the registry
    """

    database: Database
    registry: grpc.aio.Channel
    receipts: Receipts
    writer: SampleWriter
    samples: SampleStore
    forming: BatchForming
    scenarios: ScenarioDirectory
    reports: ReportIntake
    training: TrainingQueue
    server: GrpcServer
    trainers: Trainers | None
    """None: batches are formed and wait."""

    async def start(self) -> None:
        """Serves gRPC and takes up open batches. Raises BadConfiguration when the port is taken."""
        try:
            await self.scenarios.list()
        except AtollError as error:
            # The registry may start later; a scenario is bound when it is first asked for.
            log.warning("scenarios not read at start", error=error.message)
        self.forming.start()
        self.training.start()
        await self.server.start([rpc_samples.SERVICE_NAME, rpc_reports.SERVICE_NAME])
        log.info("gRPC serving", port=self.server.port)

    async def stop(self) -> None:
        """Drains: calls in progress end, every accepted sample is stored."""
        await self.server.stop()
        await self.forming.stop()
        await self.training.stop()
        await self.scenarios.stop()
        await self.writer.stop()
        if self.trainers is not None:
            await self.trainers.close()
        await self.registry.close()
        self.database.close()


def build_gateway(settings: GatewaySettings) -> Gateway:
    """Opens the database, migrating it forward. Call it in a running event loop. Raises BadConfiguration."""
    database = Database(settings.database_url)
    registry = open_channel(settings.registry, settings.token_text)
    trainers: Trainers | None = None
    if settings.trainer is not None:
        trainers = Trainers(trainer_addresses(settings.trainer), settings.token_text)
    receipts = Receipts(database.key("receipts"))
    pending = PendingReports()
    forming = BatchForming(database, pending)
    scenarios = ScenarioDirectory(registry, on_head=forming.wake)
    samples = SampleStore(database, receipts)
    client = None if trainers is None else TrainerClient(trainers)
    training = TrainingQueue(database, client, scenarios, on_requeue=forming.wake)
    forming.attach(scenarios.get, scenarios.head, on_batch=training.wake)
    reports = ReportIntake(database, receipts, scenarios.get, scenarios.head, pending, on_batch=training.wake)
    server = GrpcServer(settings.host, settings.grpc_port, settings.token_text)
    sample_service_pb2_grpc.add_SampleServiceServicer_to_server(
        rpc_samples.SampleServicer(samples, scenarios), server.grpc
    )
    report_service_pb2_grpc.add_ReportServiceServicer_to_server(rpc_reports.ReportServicer(reports), server.grpc)
    return Gateway(
        database=database,
        registry=registry,
        receipts=receipts,
        writer=SampleWriter(database),
        samples=samples,
        forming=forming,
        scenarios=scenarios,
        reports=reports,
        training=training,
        server=server,
        trainers=trainers,
    )
