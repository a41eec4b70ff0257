"""What a checkpoint remembers of the loss families that trained on the way to it, as the driver's part of it.

Format 1 held the state of the run's only family; format 2 holds every family's, with what another one may clash with.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from atoll.common.errors import InternalError
from atoll.families.catalog import AnyFamily
from atoll.families.distill.family import DistillFamily
from atoll.families.run_settings import RunSettings
from atoll.families.signal import FamilyState

DRIVER_STATE_FORMAT = 2


@dataclass(frozen=True)
class TrainedFamily:
    """A family that trained.

    Example: ``TrainedFamily({"jobs": 3}, {"action_mask": "uint8"}, reference="atoll.families.sao.spec:SaoFamily")``
    """

    state: FamilyState
    columns: Mapping[str, str] = field(default_factory=dict)
    """Element type of each of its wire keys."""
    distills: bool = False
    """Whether it is a distillation family, whose teacher's copy the checkpoint may hold."""
    reference: str = ""
    """`module:Class`: a family of another package is known by its plain name as long as it lasts."""

    @classmethod
    def of(cls, family: AnyFamily, run: RunSettings, state: FamilyState) -> "TrainedFamily":
        """What is remembered of a family in this run."""
        columns = {spec.name: spec.dtype.value for spec in family.run_columns(run)}
        return cls(state, columns, isinstance(family, DistillFamily), family.reference())


TrainedFamilies = Mapping[str, TrainedFamily]
"""By the family's plain name."""


def driver_state(families: TrainedFamilies) -> bytes:
    """What the driver keeps in a checkpoint: canonical JSON, so that equal states are equal bytes."""
    document = {
        "format": DRIVER_STATE_FORMAT,
        "families": {name: asdict(each) for name, each in families.items()},
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_driver_state(data: bytes) -> TrainedFamilies:
    """Reads what `driver_state` wrote, in this format or the older one. Raises InternalError for other bytes."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    match document:
        case {"format": 2, "families": dict() as told}:
            return {name: TrainedFamily(**each) for name, each in told.items()}
        case {"format": 1, "family": str() as name, "family_state": dict() as state}:
            return {name: TrainedFamily(state)}
    raise InternalError(
        f"the checkpoint's driver state is not of format 1 or {DRIVER_STATE_FORMAT}: {data[:80]!r}; a newer Atoll "
        "may have written it"
    )
