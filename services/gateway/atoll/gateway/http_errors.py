"""Every HTTP error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; `code` is our reason."""

import math

import orjson
import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import STATUS_OF_REASON, AtollError, InternalError, InvalidInput
from atoll.common.names import new_id
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

log = structlog.get_logger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""By HTTP status; other 4xx are "invalid_request_error", 5xx "server_error"."""

CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client left; nobody receives it."""


def http_status(error: AtollError) -> int:
    return STATUS_OF_REASON[error.reason].http


def error_body(error: AtollError) -> dict[str, dict[str, str | None]]:
    """What a client sees of an error, also inside a stream."""
    status = http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field or None, "code": error.code}}


def error_response(error: AtollError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.reason == errors_pb2.REASON_UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.reason == errors_pb2.REASON_REQUEST_TIMEOUT:
        # The rest of the request is not waited for either.
        headers["connection"] = "close"
    return Response(
        orjson.dumps(error_body(error)),
        status_code=http_status(error),
        media_type="application/json",
        headers=headers,
    )


def hidden_defect(error: Exception) -> AtollError:
    """What a client is told of an exception that nobody expected; the log has the rest under the same id."""
    incident = new_id()
    log.error("defect", incident=incident, exc_info=error)
    return InternalError(f"a defect of Atoll; the log explains incident {incident}")


def install_error_handlers(app: FastAPI) -> None:
    """Makes every answer of the app that is not a success an error body; defects are middleware's."""

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, AtollError)
        return error_response(error)

    async def bad_parameter(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return error_response(InvalidInput(f"{field}: {first['msg']}", field=field))

    async def no_such_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "no_such_route"}}
        return Response(
            orjson.dumps(body), status_code=error.status_code, media_type="application/json", headers=error.headers
        )

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(AtollError, refused)
    app.add_exception_handler(RequestValidationError, bad_parameter)
    app.add_exception_handler(HTTPException, no_such_route)
    app.add_exception_handler(ClientDisconnect, gone)
