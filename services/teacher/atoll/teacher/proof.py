"""Proves that an engine serves the model that it is said to serve.

| what | how |
|---|---|
| path | the engine's directory is the teacher's, where it can be seen from here |
| architecture | as the model's config.json names it |
| vocabulary | the K = V likeliest tokens at one position are the ids 0..V-1 once each, of probability 1 together |
| weights | the log-probs of fixed ids are those of the first engine that was proven, before and after every restart |

A vocabulary is only asked for as a whole where the path is proven: an engine of fewer ids would die of the question.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from atoll.common.engine_client import EngineClient
from atoll.common.engine_types import EngineProtocolError, LogProbs, ScoreResult
from atoll.common.errors import BadConfiguration
from atoll.teacher.model_facts import ModelFacts

PROBE_TOKENS = 32
PROBE_TOP_K = 8
MASS_TOLERANCE = 1e-2
"""Of the whole vocabulary's probability; bfloat16 logits stay far below it."""


@dataclass(frozen=True, eq=False)
class Probe:
    """What an engine said about the fixed ids. Example: Probe("http://10.0.0.5:30010", log_probs [32])."""

    url: str
    log_probs: LogProbs


class Prover:
    """Remembers what the model answers, so that engines and restarts are compared with it."""

    def __init__(self, facts: ModelFacts, tolerance: float) -> None:
        self.facts = facts
        self._tolerance = tolerance
        self._reference: Probe | None = None

    async def prove(self, client: EngineClient) -> str:
        """The name of the proven weights. Raises EngineUnavailable, or BadConfiguration that says what is different."""
        info = await client.model_info()
        seen = self._check_path(client.base_url, Path(info.model_path))
        if self.facts.architectures and info.architectures != self.facts.architectures:
            raise BadConfiguration(
                f"{client.base_url} serves the architecture {', '.join(info.architectures)}, "
                f"{self.facts.directory} is {', '.join(self.facts.architectures)}: point it at that model"
            )
        if seen:
            await self._check_vocabulary(client)
        result = await self._probe(client)
        self._check_weights(Probe(client.base_url, result.log_probs))
        return result.weight_version

    def _check_path(self, url: str, served: Path) -> bool:
        """Whether the engine's directory can be seen from here, and then it is the teacher's."""
        try:
            if not served.is_dir():
                return False
            same = served.samefile(self.facts.directory)
        except OSError:  # e.g. one that the teacher's user must not look into
            return False
        if not same:
            raise BadConfiguration(
                f"{url} serves {served}, the teacher is {self.facts.directory}: start the engine with that model, or "
                "set ATOLL_TEACHER_MODEL_PATH"
            )
        return True

    async def _check_vocabulary(self, client: EngineClient) -> None:
        size = self.facts.vocabulary_size
        try:
            result = await client.score([0], [size - 1], size)
        except EngineProtocolError as error:
            raise BadConfiguration(f"{client.base_url} has other than {size} ids: {error.message}") from error
        assert result.top_k is not None
        ids, log_probs = result.top_k.ids[0], result.top_k.log_probs[0].astype(np.float64)
        wrong = np.flatnonzero(np.sort(ids) != np.arange(size))
        if len(wrong):
            raise BadConfiguration(
                f"{client.base_url} does not answer with the ids 0..{size - 1} once each: first at {int(wrong[0])}, "
                f"got {int(np.sort(ids)[wrong[0]])}; its model has another vocabulary than {self.facts.directory}"
            )
        mass = float(np.exp(log_probs).sum())
        if abs(mass - 1) > MASS_TOLERANCE:
            raise BadConfiguration(
                f"{client.base_url}: the {size} ids of {self.facts.directory} have the probability {mass:.4f} "
                "together, expected 1: its model has more of them"
            )

    async def _probe(self, client: EngineClient) -> ScoreResult:
        size = self.facts.vocabulary_size
        ids = np.random.default_rng(0).integers(0, size, PROBE_TOKENS + 1).astype(np.int32)
        try:
            result = await client.score(ids[:1], ids[1:], min(PROBE_TOP_K, size))
        except EngineProtocolError as error:
            raise BadConfiguration(f"{client.base_url} cannot score: {error.message}") from error
        assert result.top_k is not None
        if ((result.top_k.ids < 0) | (result.top_k.ids >= size)).any() or (result.log_probs > 1e-3).any():
            raise BadConfiguration(
                f"{client.base_url} answers with ids outside 0..{size - 1} or log-probs above 0: its model is not "
                f"{self.facts.directory}"
            )
        return result

    def _check_weights(self, probe: Probe) -> None:
        if self._reference is None:
            self._reference = probe
            return
        distance = float(np.abs(probe.log_probs - self._reference.log_probs).mean())
        if distance > self._tolerance:
            said = "it did before" if probe.url == self._reference.url else f"{self._reference.url} does"
            raise BadConfiguration(
                f"{probe.url} answers the probe {distance:.3g} nats from what {said} (mean over {PROBE_TOKENS} tokens, "
                f"ATOLL_TEACHER_PROBE_TOLERANCE is {self._tolerance:g}): its weights are others"
            )
