"""Admission is pure: a chain and a batch in, a verdict out."""

from dataclasses import replace

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import version_pb2
from atoll.api.registry.v1.version_pb2 import Operation
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


# Version 2 is a checkpoint, 3 and 4 were live, and the memory that held them is gone: version 5 goes on.
CRASHED = {
    number: ChainVersion(
        number, number - 1 if number else None, WeightVersion(1, number), model_digest=f"content-{number}"
    )
    for number in range(5)
}


def after_recovery(
    model: str, operation: Operation.ValueType = version_pb2.OPERATION_RECOVERY
) -> dict[int, ChainVersion]:
    return CRASHED | {5: ChainVersion(5, 4, WeightVersion(2, 5), model_digest=model, operation=operation, restores=2)}


def admitted_after(chain: dict[int, ChainVersion], *versions: str) -> Admitted | Dropped:
    batch = [ProducedSample("a", versions)]
    known = {number: chain[number] for number in producing_numbers(batch, chain[max(chain)])}
    return admit(batch, chain[max(chain)], known, max_staleness=9)


def test_a_recovery_that_kept_the_heads_weights_costs_no_sample_of_that_head() -> None:
    chain = after_recovery("content-4")
    assert admitted_after(chain, "1:4") == Admitted((0,))
    dropped = admitted_after(chain, "1:3")
    assert isinstance(dropped, Dropped) and dropped.reason == errors_pb2.REASON_STALE_SAMPLE


def test_samples_of_versions_whose_bytes_a_recovery_found_gone_are_dropped_for_that() -> None:
    chain = after_recovery("content-2")
    for version in ("1:3", "1:4"):
        dropped = admitted_after(chain, version)
        assert isinstance(dropped, Dropped) and dropped.reason == errors_pb2.REASON_LOST_VERSION
    assert admitted_after(chain, "1:2") == Admitted((0,)), "the checkpoint's own content"
    older = admitted_after(chain, "1:1")
    assert isinstance(older, Dropped) and older.reason == errors_pb2.REASON_STALE_SAMPLE


def test_equal_content_is_admitted_across_two_recoveries() -> None:
    chain = after_recovery("content-4")
    chain[6] = ChainVersion(6, 5, WeightVersion(2, 6), model_digest="content-6")
    operation = version_pb2.OPERATION_RECOVERY
    chain[7] = ChainVersion(7, 6, WeightVersion(3, 7), model_digest="content-4", operation=operation, restores=5)
    assert admitted_after(chain, "1:4") == Admitted((0,))


def test_equal_content_is_not_admitted_across_a_rollback() -> None:
    dropped = admitted_after(after_recovery("content-2", version_pb2.OPERATION_ROLLBACK), "1:2")
    assert isinstance(dropped, Dropped) and dropped.reason == errors_pb2.REASON_STALE_SAMPLE


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
