"""May this batch be trained now? Pure: it compares versions and nothing else.

The lag of a span is 0 when its version has the head's content, else head number minus its number, within the head's
incarnation. A recovery begins an incarnation without anybody's will: equal content has lag 0 across it as well, and
never across a rollback. A sample's lag is the worst of its spans. Lags from 0 to `max_staleness` are admitted; one bad
sample drops the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.api.registry.v1 import version_pb2
from atoll.common.errors import InvalidInput
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion


@dataclass(frozen=True)
class ProducedSample:
    """A sample and the weight versions of its spans. Example: ProducedSample("4f0c...", ("1:3", "1:4"))."""

    sample_id: str
    weight_versions: tuple[str, ...]


@dataclass(frozen=True)
class Admitted:
    """Every sample is allowed. Example: Admitted((0, 1, 0))."""

    lags: tuple[int, ...]
    """Of each sample, in the batch's order."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The staleness metrics of a version."""
        stale = sum(lag > 0 for lag in self.lags)
        return {
            "staleness/samples_fresh": float(len(self.lags) - stale),
            "staleness/samples_admitted_stale": float(stale),
            "staleness/lag_max": float(max(self.lags)),
            "staleness/lag_mean": sum(self.lags) / len(self.lags),
        }


@dataclass(frozen=True)
class Dropped:
    """The batch may not be trained."""

    message: str
    """Why, with the ids and the versions seen."""
    sample_ids: tuple[str, ...]
    """The samples that caused it."""
    reason: Reason.ValueType = errors_pb2.REASON_STALE_SAMPLE
    """LOST_VERSION when it was nothing but samples of versions whose bytes a recovery found gone."""


@dataclass(frozen=True)
class _Problem:
    """Why a span is not admitted. Example: _Problem("was produced by 1:3, 2 versions ago")."""

    says: str
    is_lost: bool = False


def producing_numbers(samples: Sequence[ProducedSample], head: ChainVersion) -> frozenset[int]:
    """Version numbers whose chain entries `admit` needs: those that the samples name and that can exist.

    From a version of an earlier incarnation on it needs all: one of them began the next incarnation.
    """
    numbers: set[int] = set()
    for sample in samples:
        for text in sample.weight_versions:
            parsed = _parse(text)
            if parsed is None or parsed.number > head.number:
                continue
            earlier = parsed.incarnation < head.weight_version.incarnation
            numbers |= set(range(parsed.number, head.number + 1)) if earlier else {parsed.number}
    return frozenset(numbers)


def admit(
    samples: Sequence[ProducedSample], head: ChainVersion, versions: Mapping[int, ChainVersion], max_staleness: int
) -> Admitted | Dropped:
    """Decides about a batch. `versions` holds the chain's entries of `producing_numbers`."""
    lags: list[int] = []
    bad: list[tuple[str, _Problem]] = []
    for sample in samples:
        outcomes = [_lag(text, head, versions, max_staleness) for text in sample.weight_versions]
        problems = [outcome for outcome in outcomes if isinstance(outcome, _Problem)]
        if not outcomes:
            problems = [_Problem("names no version that produced it")]
        if problems:
            bad.append((sample.sample_id, problems[0]))
        lags.append(max((outcome for outcome in outcomes if isinstance(outcome, int)), default=0))
    if not bad:
        return Admitted(tuple(lags))
    shown = "; ".join(f"sample {sample_id} {problem.says}" for sample_id, problem in bad[:8])
    more = f"; and {len(bad) - 8} more" if len(bad) > 8 else ""
    return Dropped(
        f"{len(bad)} of {len(samples)} samples are not admitted at head {head.weight_version} with max_staleness "
        f"{max_staleness}: {shown}{more}",
        tuple(sample_id for sample_id, _ in bad),
        errors_pb2.REASON_LOST_VERSION if all(p.is_lost for _, p in bad) else errors_pb2.REASON_STALE_SAMPLE,
    )


def _parse(text: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(text)
    except InvalidInput:
        return None


def _lag(text: str, head: ChainVersion, versions: Mapping[int, ChainVersion], max_staleness: int) -> int | _Problem:
    """The lag of one span, or what is wrong with its version."""
    parsed = _parse(text)
    if parsed is None:
        return _Problem(f"was produced by {text!r}, which is no weight version")
    if parsed.incarnation != head.weight_version.incarnation:
        return _lag_across_incarnations(parsed, head, versions)
    producer = versions.get(parsed.number)
    if producer is None or producer.weight_version != parsed:
        return _Problem(f"was produced by {text}, which is not in the chain")
    if producer.model_digest == head.model_digest:
        return 0
    lag = head.number - parsed.number
    return lag if lag <= max_staleness else _Problem(f"was produced by {text}, {lag} versions ago")


def _lag_across_incarnations(
    parsed: WeightVersion, head: ChainVersion, versions: Mapping[int, ChainVersion]
) -> int | _Problem:
    another = _Problem(f"was produced by {parsed}, of another incarnation")
    producer = versions.get(parsed.number)
    if producer is None or producer.weight_version != parsed:
        return another
    since = [versions[number] for number in range(parsed.number + 1, head.number + 1)]
    restoring = [version for version in since if version.restores is not None]
    if not restoring or any(version.operation != version_pb2.OPERATION_RECOVERY for version in restoring):
        return another
    if producer.model_digest == head.model_digest:
        return 0
    if any(_lost(parsed.number, recovery, versions) for recovery in restoring):
        return _Problem(f"was produced by {parsed}, whose bytes were lost in a crash", is_lost=True)
    return another


def _lost(number: int, recovery: ChainVersion, versions: Mapping[int, ChainVersion]) -> bool:
    """Whether a recovery went back past this version, because the bytes of the head were gone."""
    restores, before = recovery.restores, versions[recovery.number - 1]
    return restores is not None and restores < number and before.model_digest != recovery.model_digest
