"""Admission is pure: a chain and a batch in, a verdict out."""

from dataclasses import replace

import pytest
from atoll.common.weight_version import WeightVersion
from atoll.trainer.admission import Admitted, Dropped, ProducedSample, admit, producing_numbers
from atoll.trainer.chain import ChainVersion

CHAIN = {
    number: ChainVersion(
        number, number - 1 if number else None, WeightVersion(2, number), model_digest=f"content-{number}"
    )
    for number in range(5)
}
HEAD = CHAIN[4]


def verdict(*versions: str, max_staleness: int = 1, head: ChainVersion = HEAD) -> Admitted | Dropped:
    return admit([ProducedSample("a", versions)], head, CHAIN | {head.number: head}, max_staleness)


@pytest.mark.parametrize(
    ("versions", "max_staleness", "lag"),
    [(("2:4",), 0, 0), (("2:3",), 1, 1), (("2:4", "2:2"), 2, 2), (("2:0",), 4, 4)],
)
def test_a_sample_within_the_staleness_is_admitted_with_its_worst_lag(
    versions: tuple[str, ...], max_staleness: int, lag: int
) -> None:
    assert verdict(*versions, max_staleness=max_staleness) == Admitted((lag,))


def test_a_version_with_the_heads_content_has_lag_0_however_old() -> None:
    head = replace(HEAD, model_digest="content-1")
    assert verdict("2:1", max_staleness=0, head=head) == Admitted((0,))
    assert isinstance(verdict("2:2", max_staleness=0, head=head), Dropped)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("2:2", "2 versions ago"),
        ("1:4", "of another incarnation"),
        ("3:4", "of another incarnation"),
        ("2:5", "not in the chain"),
        ("4", "no weight version"),
        ("", "no weight version"),
        ("2:04", "no weight version"),
    ],
)
def test_a_sample_of_another_version_drops_the_batch_and_says_why(version: str, says: str) -> None:
    got = verdict("2:4", version)
    assert isinstance(got, Dropped)
    assert says in got.message and "a" in got.message and "2:4" in got.message
    assert got.sample_ids == ("a",)


def test_another_incarnation_is_not_admitted_for_equal_content() -> None:
    chain = CHAIN | {1: replace(CHAIN[1], weight_version=WeightVersion(1, 1), model_digest=HEAD.model_digest)}
    assert isinstance(admit([ProducedSample("a", ("1:1",))], HEAD, chain, 9), Dropped)
    # The number exists, under another incarnation: 2:1 names nothing.
    assert isinstance(admit([ProducedSample("a", ("2:1",))], HEAD, chain, 9), Dropped)


def test_one_bad_sample_drops_the_batch_and_only_bad_ones_are_named() -> None:
    batch = [ProducedSample("good", ("2:4",)), ProducedSample("old", ("2:0",)), ProducedSample("empty", ())]
    got = admit(batch, HEAD, CHAIN, 1)
    assert isinstance(got, Dropped)
    assert got.sample_ids == ("old", "empty")


def test_metrics_count_fresh_and_stale_samples() -> None:
    batch = [ProducedSample(str(n), (f"2:{n}",)) for n in (4, 4, 2)]
    got = admit(batch, HEAD, CHAIN, 2)
    assert isinstance(got, Admitted)
    assert got.metrics["staleness/samples_fresh"] == 2
    assert got.metrics["staleness/samples_admitted_stale"] == 1
    assert got.metrics["staleness/lag_max"] == 2


def test_only_versions_that_can_exist_are_asked_for() -> None:
    batch = [ProducedSample("a", ("2:4", "2:1", "junk", "2:99"))]
    assert producing_numbers(batch, HEAD) == {4, 1}
