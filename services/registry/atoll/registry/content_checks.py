"""What commits and job records are checked for alike, without the database."""

import math
from collections.abc import Mapping, Sequence

from atoll.common.errors import InvalidInput
from atoll.common.names import check_id


def check_sample_ids(sample_ids: Sequence[str], field: str) -> None:
    """Raises InvalidInput for an id that is none, or comes twice."""
    seen: set[str] = set()
    for index, sample_id in enumerate(sample_ids):
        check_id(sample_id, f"{field}[{index}]")
        if sample_id in seen:
            raise InvalidInput(f"{field} names {sample_id!r} twice", field=f"{field}[{index}]")
        seen.add(sample_id)


def check_metrics(metrics: Mapping[str, float], field: str) -> None:
    """Raises InvalidInput for a number that is not finite, or has no name."""
    for name, value in metrics.items():
        if not name or not math.isfinite(value):
            raise InvalidInput(f"{field}[{name!r}] is {value}, expected a finite number under a name", field=field)
