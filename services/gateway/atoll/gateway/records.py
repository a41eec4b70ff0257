"""What the gateway records: the vocabulary of its stores. P prompt tokens, R response tokens, K captured candidates.

```
NewSample --SampleWriter--> Sample: PENDING -> RESERVED -> CONSUMED or SETTLED
NewReport --ReportIntake--> Report, and the Batch that it completes --TrainingQueue--> JobOutcome
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.families.rows import Float32, Int32, UInt8, VersionSpan
from pydantic import JsonValue

JsonObject = Mapping[str, JsonValue]


class SampleState(StrEnum):
    """Where a sample stands. A cancelled job takes RESERVED back to PENDING; nothing else goes back."""

    PENDING = "pending"
    """In no batch."""
    RESERVED = "reserved"
    """In one open batch."""
    CONSUMED = "consumed"
    """Trained by a committed version."""
    SETTLED = "settled"
    """Will never be trained, for a reason that is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class NewSample:
    """One completion as the engine sampled it, to be recorded.

    Example: NewSample(scenario="math", receipt=receipts.issue("math"), request={"messages": [...]}, text="4",
    prompt_ids=[5, 6], response_ids=[7, 2], loss_mask=[1, 1], log_probs=[-0.1, -0.7], spans=(VersionSpan(0, 2, "1:0"),),
    temperature=1.0, exact=True, finish_reason="stop", sampling={"top_p": 0.9}, created_at=datetime.now(UTC))
    """

    scenario: str
    receipt: str
    """From Receipts.issue for this scenario."""
    request: JsonObject
    """The request body as parsed JSON."""
    text: str
    """The text of the reply."""
    prompt_ids: Int32
    """[P], P >= 1"""
    response_ids: Int32
    """[R] the end token included; R = 0 only when aborted before the first token"""
    loss_mask: UInt8
    """[R] 1 on tokens that the policy sampled"""
    log_probs: Float32
    """[R] finite; of softmax(logits / temperature), before top-k, top-p and min-p filters"""
    spans: tuple[VersionSpan, ...]
    """Cover [0, R) without a gap, as the engine reported them."""
    temperature: float
    exact: bool
    """Whether `log_probs` are those of the plain policy at `temperature`."""
    finish_reason: str
    """"stop", "length", "tool_calls" or "abort"."""
    created_at: datetime
    """Timezone-aware."""
    sampling: JsonObject = field(default_factory=dict)
    """The sampling parameters as they were sent to the engine."""
    top_k_ids: Int32 | None = None
    """[R, K] most likely first; -1 where not captured, under the mask"""
    top_k_log_probs: Float32 | None = None
    """[R, K] -inf where not captured"""
    aborted: bool = False
    """The client went away: trained only when somebody reports on it."""
    conversation: str | None = None
    """Digest of the messages and the reply (conversations.py), under which a request that goes on finds this sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A recorded sample without its tensors.

    Example: Sample("math", "4f0c...", SampleState.RESERVED, created_at, 2, 2, 0, 1.0, True, "stop", False,
    (VersionSpan(0, 2, "1:0"),), {"messages": [...]}, "4", {"top_p": 0.9}, job_id="job-1a...")
    """

    scenario: str
    receipt: str
    state: SampleState
    created_at: datetime
    prompt_length: int
    """P"""
    response_length: int
    """R"""
    top_k: int
    """K; 0 when no candidates were captured."""
    temperature: float
    exact: bool
    finish_reason: str
    aborted: bool
    spans: tuple[VersionSpan, ...]
    request: JsonObject
    text: str
    sampling: JsonObject
    job_id: str = ""
    """The job that holds, consumed or settled it."""
    settled_code: str = ""
    """A reason of the error enum, e.g. "stale_sample"; empty unless it was settled."""
    settled_reason: str = ""
    """The same for people, beginning with the code."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSample:
    """A recorded sample with its tensors as they are stored and sent.

    tensors: token_ids int32 [P + R], loss_mask uint8 [R], log_probs float32 [R], then with K > 0 top_k_ids
    int32 [R, K] and top_k_log_probs float32 [R, K]; little-endian, no padding.
    """

    sample: Sample
    tensors: bytes


@dataclass(frozen=True, slots=True)
class NewReport:
    """Feedback to record.

    Example: NewReport("math", ("4f0c...",), score=1.0, metadata={"group": "q17"}, request_id="r-1")
    """

    scenario: str
    receipts: tuple[str, ...]
    """In the order of the trajectory."""
    score: float | None = None
    feedback: JsonValue = None
    """A text or an object."""
    metadata: JsonObject = field(default_factory=dict)
    request_id: str = ""
    """At most 64 characters; empty: a retry is a second report."""


@dataclass(frozen=True, slots=True)
class Report:
    """A recorded report. Example: Report("math", "9b2d...", ("4f0c...",), 1.0, None, {"group": "q17"}, created_at)"""

    scenario: str
    report_id: str
    receipts: tuple[str, ...]
    score: float | None
    feedback: JsonValue
    metadata: JsonObject
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Settlement:
    """Why something will never be trained. Example: Settlement("stale_sample", "produced by 1:0, the head is 1:3")"""

    code: str
    """A reason of the error enum in lower case."""
    message: str

    @property
    def reason(self) -> str:
        """Both in one text."""
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What a reporter is told. Example: ReportAnswer(report, job_id="job-1a...")"""

    report: Report
    job_id: str = ""
    """The training job of the batch that this report completed; empty when it completed none."""
    settled: Settlement | None = None
    """Why the samples of the report will never be trained; None while they may be."""


class BatchState(StrEnum):
    """Where a batch stands."""

    OPEN = "open"
    """Its samples are reserved; its job is submitted until the trainer says how it ended."""
    COMMITTED = "committed"
    """Its job made a version: its samples are consumed."""
    DROPPED = "dropped"
    """Not admitted: its samples are settled."""
    REFUSED = "refused"
    """Can never be trained: its samples are settled."""
    FAILED = "failed"
    """Crashed more often than allowed: its samples are settled."""
    CANCELLED = "cancelled"
    """A caller cancelled the job: its samples are pending again, for a job of the next epoch."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sample of a batch and the report that brought it. Example: BatchRow("4f0c...", "9b2d...")"""

    receipt: str
    report_id: str


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that one training job consumes, in its order.

    Example: Batch("job-1a...", "math", "grpo", {"groups_per_step": 2}, 0, (BatchRow("4f0c...", "9b2d..."),))
    """

    job_id: str
    scenario: str
    family: str
    """As the scenario names it."""
    options: JsonObject
    """Complete, with defaults."""
    epoch: int
    """How often its reports were put back."""
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a training job ended.

    Example: JobOutcome(BatchState.COMMITTED, version=3) or
    JobOutcome(BatchState.DROPPED, Settlement("stale_sample", "sample 4f0c... was produced by 1:0"))
    """

    state: BatchState
    why: Settlement | None = None
    """None when committed."""
    version: int | None = None
    """Number of the committed version."""

    @property
    def reason(self) -> str:
        return "" if self.why is None else self.why.reason

    @property
    def code(self) -> str:
        return "" if self.why is None else self.why.code
