"""Records as messages."""

from atoll.api.errors.v1 import errors_pb2
from atoll.api.gateway.v1 import report_pb2, sample_pb2, sample_service_pb2
from atoll.common.errors import REASON_PREFIX
from atoll.common.names import report_name, sample_name
from atoll.common.structs import struct_from, timestamp_from, value_from
from atoll.gateway.records import Report, Sample, SampleState
from atoll.gateway.sample_packing import tensor_specs
from atoll.gateway.sample_store import ReportedPackedSample

_STATES: dict[SampleState, sample_pb2.SampleState.ValueType] = {
    SampleState.PENDING: sample_pb2.SAMPLE_STATE_PENDING,
    SampleState.RESERVED: sample_pb2.SAMPLE_STATE_RESERVED,
    SampleState.CONSUMED: sample_pb2.SAMPLE_STATE_CONSUMED,
    SampleState.SETTLED: sample_pb2.SAMPLE_STATE_SETTLED,
}


def state_of(message: sample_pb2.SampleState.ValueType) -> SampleState | None:
    """None for unspecified and for states of a newer contract."""
    return next((state for state, value in _STATES.items() if value == message), None)


def reason_of(code: str) -> errors_pb2.Reason.ValueType:
    """The reason that a code names; unspecified for none, and for one of a newer contract."""
    known = errors_pb2.Reason.DESCRIPTOR.values_by_name.get(f"{REASON_PREFIX}{code.upper()}")
    return errors_pb2.REASON_UNSPECIFIED if known is None else errors_pb2.Reason.Value(known.name)


def sample_message(sample: Sample) -> sample_pb2.Sample:
    return sample_pb2.Sample(
        name=sample_name(sample.scenario, sample.receipt),
        receipt=sample.receipt,
        scenario=sample.scenario,
        state=_STATES[sample.state],
        create_time=timestamp_from(sample.created_at),
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        temperature=sample.temperature,
        exact=sample.exact,
        finish_reason=sample.finish_reason,
        spans=[
            sample_pb2.WeightVersionSpan(weight_version=span.weight_version, start=span.start, end=span.end)
            for span in sample.spans
        ],
        job_id=sample.job_id,
        settled_reason=sample.settled_reason,
        settled_code=reason_of(sample.settled_code),
        request=struct_from(sample.request, "request"),
        text=sample.text,
    )


def report_message(report: Report) -> report_pb2.Report:
    message = report_pb2.Report(
        name=report_name(report.scenario, report.report_id),
        report_id=report.report_id,
        scenario=report.scenario,
        receipts=report.receipts,
        metadata=struct_from(report.metadata, "metadata"),
        create_time=timestamp_from(report.created_at),
    )
    if report.score is not None:
        message.score = report.score
    if report.feedback is not None:
        message.feedback.CopyFrom(value_from(report.feedback, "feedback"))
    return message


def row_header(row: ReportedPackedSample) -> sample_service_pb2.RowHeader:
    return sample_service_pb2.RowHeader(
        sample=sample_message(row.packed.sample),
        reports=[report_message(report) for report in row.reports],
        tensors=tensor_specs(row.packed.sample),
        receipts=row.receipts,
    )
