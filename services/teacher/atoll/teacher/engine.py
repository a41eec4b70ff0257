"""One engine as the teacher sees it: how it is, what it works on, and whether it is worth another try."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from atoll.common.engine_types import Ids, ScoreResult


class ScoringEngine(Protocol):
    """What scoring needs of an engine; `atoll.common.engine_client.EngineClient` has it."""

    async def score(self, prompt_ids: Ids, response_ids: Ids, top_k: int = 0) -> ScoreResult: ...


class EngineState(Enum):
    """```
    STARTING --proven--> SERVING --no answer--> AWAY --proven--> SERVING
        |                    '--failed proof--> REFUSED --proven--> SERVING
        '--no answer, failed proof--> AWAY, REFUSED
    ```
    The engine's watch moves it, and a proof on demand.
    """

    STARTING = "starting"
    SERVING = "serving"
    AWAY = "away"
    REFUSED = "refused"


@dataclass(eq=False)
class Engine:
    """Example: Engine("http://10.0.0.5:30010", client, size=16384)."""

    url: str
    client: ScoringEngine
    size: int
    """Tokens that it works on at once; a longer sequence runs alone."""
    state: EngineState = EngineState.STARTING
    detail: str = ""
    """Why it does not serve."""
    weight_version: str = ""
    """What its proven weights are called; a frozen model's never changes."""
    in_flight: int = 0
    """Tokens leased out of `size`."""
    sequences_scored: int = 0
    restarts: int = 0
    """How often it was started again; numbers its lives."""
    excused: set[int] = field(default_factory=set)
    """Lives whose end one sequence is to blame for, and no defect of the engine."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set for its watch: somebody doubts it, or it was refused."""
    _verdicts: list[asyncio.Future[bool]] = field(default_factory=list)
    _blamed: set[int] = field(default_factory=set)
    _sound: bool = False

    @property
    def serving(self) -> bool:
        return self.state is EngineState.SERVING

    def answered(self) -> None:
        """It scored a sequence."""
        self.sequences_scored += 1
        self._sound = True
        self._excuse()

    def blame(self, lives: set[int]) -> None:
        """A sequence that kills engines ended these lives.

        It excuses the engine only once that has scored another one, else an engine that dies of everything would be
        started again for ever and every sequence refused.
        """
        self._blamed |= lives
        self._excuse()

    def _excuse(self) -> None:
        if self._sound and self._blamed:
            self.excused |= self._blamed
            self._blamed.clear()
            self._sound = False

    async def lives(self) -> bool:
        """Has its watch look now, after a failure; False when it is away. One look answers all who wait."""
        if not self.serving:
            return False
        verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._verdicts.append(verdict)
        self.changed.set()
        return await verdict

    @property
    def doubted(self) -> bool:
        return bool(self._verdicts)

    def tell(self, lives: bool) -> None:
        """Answers everybody who doubts."""
        verdicts, self._verdicts = self._verdicts, []
        for verdict in verdicts:
            if not verdict.done():
                verdict.set_result(lives)
