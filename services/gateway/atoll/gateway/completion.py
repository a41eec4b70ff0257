"""One choice of an answer: gathered from the engine's chunks, recorded as one sample."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np
from atoll.api.errors.v1 import errors_pb2
from atoll.common.chat_template import Message
from atoll.common.engine_types import Finish, FinishReason, GenerationChunk, SamplingParams
from atoll.common.errors import InternalError
from atoll.families.rows import VersionSpan
from atoll.gateway.conversations import conversation_key
from atoll.gateway.records import JsonObject, NewSample


class Completion:
    """Grows by add(); sample() is what is recorded. Ids are the engine's own, never made from the text."""

    def __init__(self, index: int, receipt: str, stop: tuple[str, ...]) -> None:
        self.index = index
        self.receipt = receipt
        self._stop = stop
        self.finish: Finish | None = None
        self._chunks: list[GenerationChunk] = []

    def add(self, chunk: GenerationChunk) -> GenerationChunk:
        """Returns the chunk as the client gets it."""
        if chunk.finish is not None:
            self.finish = chunk.finish
            chunk = self._cut(chunk)
        self._chunks.append(chunk)
        return chunk

    def _cut(self, last: GenerationChunk) -> GenerationChunk:
        """Ends the text before the earliest stop string: of several in one token, SGLang cuts at the first listed."""
        sent = self.text
        found = [place for place in ((sent + last.text).find(text) for text in self._stop) if place >= 0]
        if not found:
            return last
        return replace(last, text=last.text[: max(0, min(found) - len(sent))])

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def token_count(self) -> int:
        """R, as received so far."""
        return sum(len(chunk.token_ids) for chunk in self._chunks)

    @property
    def aborted(self) -> bool:
        return self.finish is not None and self.finish.reason is FinishReason.ABORT

    @property
    def weight_version(self) -> str | None:
        """The version that sampled the last token; a publish in mid-reply gives the sample several."""
        spans = () if self.finish is None else self.finish.spans
        return spans[-1].weight_version if spans else None

    def sample(
        self,
        scenario: str,
        request: JsonObject,
        messages: Sequence[Message],
        prompt_ids: list[int],
        params: SamplingParams,
        created_at: datetime,
    ) -> NewSample:
        """The sample, all of whose response tokens are trained on. messages: as the template saw them.

        Raises InternalError(ENGINE_PROTOCOL) when the engine never said how the reply ended.
        """
        if self.finish is None:
            raise InternalError(
                f"the engine's reply for sample {self.receipt} has no end", reason=errors_pb2.REASON_ENGINE_PROTOCOL
            )
        response_ids = np.concatenate([chunk.token_ids for chunk in self._chunks])
        captured = [chunk.top_k for chunk in self._chunks if chunk.top_k is not None]
        sampling = {name: value for name, value in params.to_wire().items() if name not in ("temperature", "n")}
        return NewSample(
            scenario=scenario,
            receipt=self.receipt,
            request=request,
            text=self.text,
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            response_ids=response_ids,
            loss_mask=np.ones(len(response_ids), dtype=np.uint8),
            log_probs=np.concatenate([chunk.log_probs for chunk in self._chunks]),
            # A version that was replaced before it sampled a token has an empty span.
            spans=tuple(
                VersionSpan(span.start, span.end, span.weight_version)
                for span in self.finish.spans
                if span.end > span.start
            ),
            temperature=params.temperature,
            exact=params.exact,
            finish_reason=self.finish.reason.value,
            created_at=created_at,
            sampling=sampling,  # type: ignore[arg-type]
            aborted=self.aborted,
            conversation=conversation_key([*messages, {"role": "assistant", "content": self.text}]),
            top_k_ids=np.concatenate([each.ids for each in captured]) if captured else None,
            top_k_log_probs=np.concatenate([each.log_probs for each in captured]) if captured else None,
        )
