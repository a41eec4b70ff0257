"""What a family sees of a recorded sample and its report before it is a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from atoll.families.batching import ReportView
from atoll.families.rows import Float32, Int32, UInt8, VersionSpan
from pydantic import JsonValue


@dataclass(frozen=True, slots=True, eq=False)
class SampleView:
    """A recorded sample as a family sees it before it is a row."""

    sample_id: str
    tokens: Int32
    """[P+R]"""
    prompt_length: int
    loss_mask: UInt8
    """[R]"""
    log_probs: Float32
    """[R] as recorded by the engine"""
    temperature: float
    exact: bool
    versions: tuple[VersionSpan, ...]
    created_at: datetime
    request: Mapping[str, JsonValue] = field(default_factory=dict)
    """The chat request as it was received."""
    text: str = ""
    top_k_ids: Int32 | None = None
    """[R, K] the engine's most likely ids, most likely first, where they were captured; -1 where a token has none."""
    top_k_log_probs: Float32 | None = None
    """[R, K] their log-probs, of the same distribution as `log_probs`; -inf where the id is -1."""
    turns: tuple[str, ...] = ()
    """Ids of the samples that a trajectory is made of, its own first; empty for a sample that stands alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ReportedSample:
    """A sample and the report about it."""

    sample: SampleView
    report: ReportView


class PromptRenderer(Protocol):
    """Renders chat messages with the scenario's template and tokenizer, as the gateway did for the sample."""

    def render(self, messages: Sequence[Mapping[str, JsonValue]]) -> Int32:
        """Token ids [P] of the prompt, the generation prompt included."""


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """What a family may look at besides the sample whose row it shapes."""

    batch: tuple[ReportedSample, ...]
    """All of the batch, in its order."""
    renderer: PromptRenderer | None = None
    """There where `needs_prompt_renderer` says so."""
