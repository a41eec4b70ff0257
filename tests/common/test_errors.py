from urllib.parse import quote

import grpc
import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.common import rpc_errors
from atoll.common.errors import STATUS_OF_REASON, AtollError, Conflict, InvalidInput, Unavailable
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def test_every_reason_has_a_status_and_unspecified_has_none() -> None:
    assert set(STATUS_OF_REASON) == set(Reason.values()) - {errors_pb2.REASON_UNSPECIFIED}


def test_the_comment_of_every_reason_states_the_status_it_has() -> None:
    from pathlib import Path

    comments: dict[str, str] = {}
    comment = ""
    for line in Path("protos/atoll/api/errors/v1/errors.proto").read_text().splitlines():
        text = line.strip()
        if text.startswith("//"):
            comment += " " + text.removeprefix("//").strip()
        elif text.startswith("REASON_"):
            comments[text.split(" ")[0]] = comment
            comment = ""
        elif not text:
            comment = ""
    for reason, status in STATUS_OF_REASON.items():
        name = Reason.Name(reason)
        if name == "REASON_BAD_CONFIGURATION":
            continue
        assert status.grpc.name in comments[name], name
        assert str(status.http) in comments[name], name


@pytest.mark.parametrize("error", [InvalidInput("no", field="a.b"), Unavailable("later", retry_after_s=2.5)])
def test_the_rich_status_carries_reason_field_and_retry(error: AtollError) -> None:
    status = rpc_errors.to_status(error)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found = {detail.TypeName() for detail in status.details for m in (info, bad, retry) if detail.Unpack(m)}
    assert info.domain == "atoll"
    assert "REASON_" + info.reason == Reason.Name(error.reason)
    assert ("google.rpc.BadRequest" in found) == bool(error.field)
    assert ("google.rpc.RetryInfo" in found) == (error.retry_after_s is not None)
    assert rpc_status.to_status(status).code is STATUS_OF_REASON[error.reason].grpc
    assert isinstance(STATUS_OF_REASON[error.reason].grpc, grpc.StatusCode)


def test_the_samples_that_a_refusal_blames_travel_with_it_up_to_a_headers_size() -> None:
    samples = tuple(f"{number:032x}" for number in range(1_000))
    for given, told in ((samples[:2], samples[:2]), (samples, samples[: rpc_errors.SAMPLES_SENT]), ((), ())):
        error = Conflict("taken", reason=errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED, sample_ids=given)
        status = rpc_status.to_status(rpc_errors.to_status(error))
        assert sum(len(key) + len(value) for key, value in status.trailing_metadata) < 4096
        trailing = grpc.aio.Metadata(*status.trailing_metadata)
        raised = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)
        received = rpc_errors.from_rpc_error(raised)
        assert (type(received), received.sample_ids) == (Conflict, told)


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "版本" * 5000, "sample 12 is bad; " * 300])
def test_a_message_of_any_length_fits_into_a_reply_with_its_start_and_its_end(text: str) -> None:
    samples = tuple(f"{number:032x}" for number in range(64))
    error = InvalidInput(f"what is wrong: {text}; what to do", field="x" * 5000, sample_ids=samples)
    status = rpc_status.to_status(rpc_errors.to_status(error))
    sent = len(quote(status.details)) + sum(len(key) + len(value) * 4 / 3 for key, value in status.trailing_metadata)
    assert sent < 8 * 1024
    assert status.details.startswith("what is wrong: ") and status.details.endswith("; what to do")
