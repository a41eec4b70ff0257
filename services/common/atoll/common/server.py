"""One way to run a gRPC service: authentication, errors, health, reflection, and a drained stop."""

from __future__ import annotations  # the gRPC types are generic in their stubs only

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from atoll.common import rpc_errors
from atoll.common.auth import check_token, refuse_open_listener
from atoll.common.channels import MAX_MESSAGE_BYTES
from atoll.common.errors import AtollError, BadConfiguration, InternalError, InvalidInput
from atoll.common.logs import configure_logging
from atoll.common.names import new_id
from atoll.common.settings import S, load_settings
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

log = structlog.get_logger(__name__)

OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Answered without a token: probes carry none."""

DRAIN_SECONDS = 5.0
"""How long calls may finish after SIGTERM; watches are cut then."""


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class _Guard(grpc.aio.ServerInterceptor):
    """Checks the token and turns every exception into a status with a reason."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if not method.startswith(OPEN_SERVICES):
            metadata = dict(handler_call_details.invocation_metadata or ())
            header = metadata.get("authorization")
            try:
                check_token(header if isinstance(header, str) else None, self._token)
            except AtollError as error:
                return _refusal(handler, error)
        return _translated(handler, method) if method.startswith("/atoll.") else handler


def _like(handler: Handler, behavior: Callable[..., Any]) -> Handler:
    """A handler of the same kind and types with another behavior."""
    if handler.response_streaming:
        make: Callable[..., Handler] = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
    else:
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    read = handler.request_deserializer
    # A stream's messages are read while the behavior runs, which is for the library to end.
    readable = read if read is None or handler.request_streaming else _marking_unreadable(read)
    return make(behavior, readable, handler.response_serializer)


@dataclass(frozen=True)
class _Unreadable:
    """Takes the place of a request whose bytes are not its message."""

    reason: str


def _marking_unreadable(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    # An exception in here would reach the client as UNKNOWN with the exception's name, and the log as a defect.
    def marked(data: bytes) -> object:
        try:
            return read(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return marked


def _refuse_unreadable(request: object) -> None:
    if isinstance(request, _Unreadable):
        raise InvalidInput(f"the request cannot be read: {request.reason}; is it made from the same .proto files?")


def _refusal(handler: Handler, error: AtollError) -> Handler:
    async def refuse(_request: object, context: Context) -> NoReturn:
        await rpc_errors.abort(context, error)

    return _like(handler, refuse)


def _translated(handler: Handler, method: str) -> Handler:
    """The same handler with AtollError aborted as its status, anything else logged and hidden behind an id."""
    behaviors = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    inner: Callable[..., Any] = next(behavior for behavior in behaviors if behavior is not None)

    async def fail(context: Context, error: Exception) -> NoReturn:
        if isinstance(error, AtollError):
            await rpc_errors.abort(context, error)
        incident = new_id()
        log.error("defect", method=method, incident=incident, exc_info=error)
        await rpc_errors.abort(context, InternalError(f"a defect of Atoll; the log explains incident {incident}"))

    async def stream(request: object, context: Context) -> AsyncIterator[object]:
        try:
            _refuse_unreadable(request)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await fail(context, error)

    async def single(request: object, context: Context) -> object:
        try:
            _refuse_unreadable(request)
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await fail(context, error)

    return _like(handler, stream if handler.response_streaming else single)


class GrpcServer:
    """A server with health and reflection.

    Use: server = GrpcServer(host, port, token); add services to server.grpc; await server.start([full names]);
    then server.port tells the port that was bound (port 0 picks a free one); await server.stop().
    """

    def __init__(self, host: str, port: int, token: str | None) -> None:
        refuse_open_listener(host, token, "the gRPC listen address")
        # so_reuseport off: two services on one port would share its calls silently.
        self.grpc = grpc.aio.server(
            interceptors=[_Guard(token)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._address = f"{host}:{port}"
        self._names: Sequence[str] = ()
        self.port = port

    async def start(self, service_names: Sequence[str], *, serving: bool = True) -> None:
        """Binds and serves; health says SERVING from here on, or when `set_serving` says so.

        Raises BadConfiguration when the port is taken.
        """
        self._names = [*service_names, ""]
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)
        try:
            self.port = self.grpc.add_insecure_port(self._address)
        except RuntimeError as error:
            raise BadConfiguration(f"cannot listen on {self._address}: {error}") from None
        # Before the first probe can be answered.
        await self.set_serving(serving)
        await self.grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on: a service that runs and cannot do its work is NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Says NOT_SERVING, lets calls finish for DRAIN_SECONDS, then cuts them."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.stop(DRAIN_SECONDS)


async def wait_for_stop_signal() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def run_service(name: str, kind: type[S], main: Callable[[S], Coroutine[Any, Any, None]]) -> NoReturn:
    """The `__main__` of a service: settings, logging, its main coroutine; a refusal is one line and exit status 2."""
    try:
        settings = load_settings(kind)
        # Before anything is waited for: a service may need its neighbours up before it makes its server.
        refuse_open_listener(settings.host, settings.token_text, f"{kind.model_config.get('env_prefix', '')}HOST")
        configure_logging(name, settings.log_level)
        asyncio.run(main(settings))
    except BadConfiguration as error:
        print(f"atoll {name}: {error.message}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
