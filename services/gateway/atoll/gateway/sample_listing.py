"""GET /atoll/scenarios/{s}/samples: what was recorded, and where each sample stands, without tensors."""

from atoll.common.errors import InvalidInput
from atoll.gateway.records import JsonObject, Sample, SampleState


def sample_state(text: str) -> SampleState | None:
    """The state that a query asks for; empty: all. Raises InvalidInput."""
    if not text:
        return None
    try:
        return SampleState(text)
    except ValueError:
        known = ", ".join(state.value for state in SampleState)
        raise InvalidInput(f"state is {text[:80]!r}, expected one of {known}", field="state") from None


def sample_as_json(sample: Sample) -> JsonObject:
    """Example: {"receipt": "4f0c...", "state": "settled", "settled_code": "stale_sample", "text": "4", ...}"""
    return {
        "receipt": sample.receipt,
        "state": sample.state.value,
        "created_at": sample.created_at.isoformat(),
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "top_k": sample.top_k,
        "temperature": sample.temperature,
        "exact": sample.exact,
        "finish_reason": sample.finish_reason,
        "weight_versions": [span.weight_version for span in sample.spans],
        "job_id": sample.job_id or None,
        "settled_code": sample.settled_code or None,
        "settled_reason": sample.settled_reason or None,
        "request": dict(sample.request),
        "text": sample.text,
    }
