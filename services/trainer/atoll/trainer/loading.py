"""What the workers hold: loads the head into them and remembers whether it is still untouched."""

import asyncio
from pathlib import Path

import structlog
from atoll.common.errors import BadConfiguration
from atoll.trainer.backend import TrainingBackend
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.retries import Patience
from atoll.trainer.trained_families import TrainedFamilies, read_driver_state

log = structlog.get_logger(__name__)


class WorkerModel:
    """The model in the workers' memory. `number` is None whenever it is not exactly a version of the chain."""

    def __init__(self, backend: TrainingBackend, chain: Chain, patience: Patience) -> None:
        self._backend = backend
        self._chain = chain
        self._patience = patience
        self.number: int | None = None
        self.loaded_number: int | None = None
        """The last version that was in memory as a whole; what GetTrainer tells."""
        self.families: TrainedFamilies = {}
        """Those that trained on the way to it."""

    async def load(self, version: ChainVersion) -> None:
        """Loads a version: its checkpoint where it has one, its weights alone for version 0.

        Raises BackendCrashed, InvalidInput from the backend for a model it cannot train, BadConfiguration for a
        version without a checkpoint.
        """
        refuse_untrainable(version)
        self.touch()
        model = await self._location(version.model_digest)
        checkpoint = await self._location(version.checkpoint_digest) if version.checkpoint_digest else None
        base = await self._patience.ask("version 0", lambda: self._chain.version(0))
        reference = await self._location(base.model_digest)
        loaded = await asyncio.to_thread(self._backend.load, model, checkpoint, reference)
        self.families = {} if loaded.driver_state is None else read_driver_state(loaded.driver_state)
        self.hold(version, self.families)
        log.info("version loaded", version=version.number, optimizer_steps=loaded.steps_taken)

    def touch(self) -> None:
        """Call before anything changes the weights."""
        self.number = None

    def hold(self, version: ChainVersion, families: TrainedFamilies) -> None:
        """The memory is this version: just loaded, or just committed from it."""
        self.number = self.loaded_number = version.number
        self.families = families

    async def _location(self, digest: str) -> Path:
        return await self._patience.ask("artifact location", lambda: self._chain.location(digest))


def refuse_untrainable(version: ChainVersion) -> None:
    """Raises BadConfiguration for a head that has weights and no optimizer state."""
    if version.number > 0 and not version.checkpoint_digest:
        raise BadConfiguration(
            f"version {version.number} keeps no checkpoint, so training cannot go on from it: roll back"
        )
