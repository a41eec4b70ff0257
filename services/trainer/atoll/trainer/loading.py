"""What the workers hold: loads the head into them and remembers whether it is still untouched."""

import asyncio
from pathlib import Path

import structlog
from atoll.common.errors import BadConfiguration
from atoll.common.intact import refuse_damaged
from atoll.trainer.backend import BackendCrashed, TrainingBackend
from atoll.trainer.chain import Chain, ChainVersion
from atoll.trainer.recovery import checkpoint_origin
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
        """Loads a version: its checkpoint where it has one, else its weights alone, as for version 0.

        A version that goes on from another one's checkpoint with other weights takes the weights from its model. Every
        file is compared with its manifest before it is trusted. Raises BackendCrashed, InvalidInput from the backend
        for a model it cannot train, BadConfiguration for a live version and for files that are damaged.
        """
        if not version.durable:
            raise BadConfiguration(f"version {version.number} is live: it keeps no checkpoint to go on from")
        self.touch()
        origin = await self._patience.ask("restored version", lambda: checkpoint_origin(self._chain, version))
        model = await self._intact(version.model_digest)
        checkpoint = await self._intact(version.checkpoint_digest) if version.checkpoint_digest else None
        base = await self._patience.ask("version 0", lambda: self._chain.version(0))
        reference = model if base.model_digest == version.model_digest else await self._intact(base.model_digest)
        try:
            loaded = await asyncio.to_thread(
                self._backend.load,
                model,
                checkpoint,
                reference,
                weights_from_model=origin.model_digest != version.model_digest,
            )
        except OSError as error:
            # A disk that fails for a while is no defect; whoever needs the version tries again.
            raise BackendCrashed(0, f"could not read version {version.number}: {error}", "") from error
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

    async def _intact(self, digest: str) -> Path:
        return await intact_directory(self._chain, self._patience, digest)


async def intact_directory(chain: Chain, patience: Patience, digest: str) -> Path:
    """Where an artifact is. Raises BadConfiguration naming the files that are not what was committed."""
    artifact = await patience.ask("artifact", lambda: chain.artifact(digest))
    location = Path(artifact.location)
    await asyncio.to_thread(refuse_damaged, location, artifact.files)
    return location
