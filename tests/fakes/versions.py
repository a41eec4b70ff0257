"""A chain of versions from memory, as far as publishing reads it."""

from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import NotFound
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion


class FakeVersions:
    """Starts with version 0, `1:0`, of content "base"; the model of a digest lies in `/store/<digest>`."""

    def __init__(self) -> None:
        self.scenario = "chat"
        self.entries = [ChainVersion(0, None, WeightVersion(1, 0), model_digest="base")]

    def append(self, digest: str, *, incarnation: int | None = None, job_id: str = "") -> ChainVersion:
        """A new head."""
        before = self.entries[-1]
        name = WeightVersion(incarnation or before.weight_version.incarnation, before.number + 1)
        made = ChainVersion(name.number, before.number, name, job_id=job_id, model_digest=digest)
        self.entries.append(made)
        return made

    async def head(self) -> ChainVersion:
        return self.entries[-1]

    async def version(self, number: int) -> ChainVersion:
        if number >= len(self.entries):
            raise NotFound(f"no version {number}", reason=errors_pb2.REASON_VERSION_NOT_FOUND)
        return self.entries[number]

    async def location(self, digest: str) -> Path:
        return Path("/store") / digest
