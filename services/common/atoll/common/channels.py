"""gRPC channels: the token on every call, keep-alive, and retries for what is safe to repeat."""

import json
from collections.abc import Sequence

import grpc
from atoll.common.errors import BadConfiguration

MAX_MESSAGE_BYTES = 16 << 20

_RETRY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

IDEMPOTENT_METHODS: dict[str, Sequence[str]] = {
    "atoll.api.registry.v1.ScenarioService": ("CreateScenario", "GetScenario", "ListScenarios"),
    "atoll.api.registry.v1.VersionService": ("CommitVersion", "GetVersion", "ListVersions"),
    "atoll.api.registry.v1.ArtifactService": (
        "StageArtifact",
        "SealArtifact",
        "AbandonArtifact",
        "GetArtifact",
        "ListArtifacts",
        "PinVersion",
        "PlanRetention",
    ),
    "atoll.api.registry.v1.LeaseService": ("AcquireLease", "RenewLease", "ReleaseLease", "GetLease"),
    "atoll.api.registry.v1.JobRecordService": ("PutJobRecord", "GetJobRecord", "ListJobRecords"),
    "atoll.api.trainer.v1.TrainerService": ("SubmitJob", "GetJob", "ListJobs", "GetTrainer"),
    "atoll.api.gateway.v1.SampleService": ("ListSamples",),
    "atoll.api.teacher.v1.TeacherService": ("GetTeacher", "CompareTokenizer"),
}
"""Methods whose second call does what the first did: by key, or because they only read."""


def service_config() -> str:
    """The gRPC service config that clients of Atoll use, as JSON."""
    names = [{"service": s, "method": m} for s, methods in IDEMPOTENT_METHODS.items() for m in methods]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY}]})


class _Token:
    """Puts the bearer token into a call's metadata."""

    def __init__(self, token: str) -> None:
        self._entry = ("authorization", f"Bearer {token}")

    def details(self, call: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(call.metadata or ()), self._entry)
        return grpc.aio.ClientCallDetails(call.method, call.timeout, metadata, call.credentials, call.wait_for_ready)


# grpc.aio registers an interceptor for the first kind it is an instance of, so each kind needs its own class.
class _UnaryUnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return await continuation(self.details(client_call_details), request)


class _UnaryStreamToken(_Token, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return await continuation(self.details(client_call_details), request)


class _StreamStreamToken(_Token, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):  # type: ignore[no-untyped-def]
        return await continuation(self.details(client_call_details), request_iterator)


def open_channel(address: str, token: str | None = None, *, retries: bool = True) -> grpc.aio.Channel:
    """A channel to `host:port`. It connects lazily and reconnects by itself. Must be called in a running loop.

    retries: False for a caller that has somebody else to ask.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or host.startswith(("http://", "https://")):
        raise BadConfiguration(f"address is {address!r}, expected host:port")
    options = [
        ("grpc.service_config", service_config()),
        ("grpc.enable_retries", int(retries)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    interceptors: Sequence[grpc.aio.ClientInterceptor] = ()
    if token is not None:
        interceptors = (_UnaryUnaryToken(token), _UnaryStreamToken(token), _StreamStreamToken(token))
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
