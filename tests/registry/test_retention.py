from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from atoll.registry.retention import (
    UNCOMMITTED_GRACE,
    Facts,
    Plan,
    Policy,
    Rules,
    StoredArtifact,
    VersionBytes,
    plan,
)
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=30)
SIZE = 100
KEEP_TWO = Rules(Policy.LATEST, keep=2, max_storage=10**9, min_free=0)


def chain(count: int, scenario: str = "s", live: frozenset[int] = frozenset()) -> list[VersionBytes]:
    """Versions 0..count-1 with models m0, m1, ... and, but for 0 and the live ones, checkpoints c1, c2, ..."""
    return [
        VersionBytes(
            scenario,
            number,
            number not in live,
            f"m{number}",
            f"c{number}" if number and number not in live else None,
            LONG_AGO + timedelta(hours=number),
        )
        for number in range(count)
    ]


def facts(
    versions: list[VersionBytes], *more: StoredArtifact, needed: dict[str, str] | None = None, free: int = 10**9
) -> Facts:
    """Each artifact of the versions has SIZE bytes; `more` are there besides, or in place of one of the same digest."""
    digests = {digest for version in versions for digest in version.digests} - {artifact.digest for artifact in more}
    stored = [StoredArtifact(digest, SIZE, LONG_AGO) for digest in sorted(digests)]
    return Facts(versions, [*stored, *more], needed or {}, free)


def removed(planned: Plan) -> str:
    return " ".join(planned.removed)


def why(planned: Plan, digest: str) -> str:
    return next(decision.why for decision in planned.decisions if decision.artifact.digest == digest)


def test_checkpoints_older_than_the_newest_go_but_not_version_0s_model() -> None:
    planned = plan(facts(chain(6)), KEEP_TWO, NOW)
    assert removed(planned) == "c1 c2 c3 m1 m2 m3"
    assert why(planned, "m5") == "head of s"
    assert why(planned, "c4") == "parent of the head of s"
    assert why(planned, "m0") == "base model of s"
    assert why(planned, "c3") == "version 3 of s is not among the 2 newest checkpoints"


def test_more_are_kept_when_more_are_asked_for() -> None:
    planned = plan(facts(chain(6)), replace(KEEP_TWO, keep=3), NOW)
    assert removed(planned) == "c1 c2 m1 m2"
    assert why(planned, "m3") == "among the 3 newest checkpoints of s"


def test_the_heads_parent_stays_when_one_is_kept() -> None:
    assert removed(plan(facts(chain(4)), replace(KEEP_TWO, keep=1), NOW)) == "c1 m1"


def test_live_exports_go_when_their_successor_has_one_and_do_not_count_as_checkpoints() -> None:
    planned = plan(facts(chain(7, live=frozenset({3, 5, 6}))), KEEP_TWO, NOW)
    assert removed(planned) == "c1 m1 m3"
    assert why(planned, "m3") == "version 3 of s is live and its successor has one"
    assert (why(planned, "m5"), why(planned, "c4")) == ("parent of the head of s", "newest checkpoint of s")
    assert why(planned, "c2") == "among the 2 newest checkpoints of s"


def test_the_newest_checkpoint_stays_with_its_model_however_long_the_live_ones_are() -> None:
    planned = plan(facts(chain(9, live=frozenset(range(3, 9)))), replace(KEEP_TWO, keep=1, max_storage=1), NOW)
    assert removed(planned) == "c1 m1 m3 m4 m5 m6"
    assert (why(planned, "m2"), why(planned, "c2")) == ("newest checkpoint of s", "newest checkpoint of s")


def test_a_newest_checkpoint_that_lost_its_model_protects_the_one_before_too() -> None:
    given_facts = facts(chain(6, live=frozenset({4, 5})))
    lost = replace(given_facts, artifacts=[a for a in given_facts.artifacts if a.digest != "m3"])
    planned = plan(lost, replace(KEEP_TWO, keep=1, max_storage=1), NOW)
    assert removed(planned) == "c1 m1"
    assert (why(planned, "c3"), why(planned, "c2")) == ("newest checkpoint of s", "newest checkpoint of s")


@pytest.mark.parametrize("back_to", [0, 4, 3])
def test_rollbacks_take_no_checkpoints_place(back_to: int) -> None:
    versions = chain(5)
    for number in range(5, 9):
        back = replace(versions[back_to], number=number, committed_at=LONG_AGO + timedelta(hours=number))
        versions.append(back)
        assert removed(plan(facts(versions), KEEP_TWO, NOW)) == "c1 c2 m1 m2"


def test_rollbacks_take_no_place_among_the_best_rewarded() -> None:
    versions = rewarded([None, 0.5, 0.1, 0.4])
    versions += [replace(versions[1], number=number, reward=0.6) for number in (4, 5)]
    assert removed(plan(facts(versions), BEST_TWO, NOW)) == "c2 m2"


def test_what_a_kept_version_or_another_scenario_shares_stays() -> None:
    versions = chain(5)
    versions[4] = replace(versions[4], model_digest="m1")
    other = VersionBytes("t", 0, True, "m2", None, LONG_AGO)
    assert removed(plan(facts([*versions, other]), KEEP_TWO, NOW)) == "c1 c2"


def test_pinned_versions_and_what_open_jobs_need_stay_even_when_a_bound_asks_for_room() -> None:
    versions = chain(8)
    versions[1] = replace(versions[1], is_pinned=True)
    needed = {"m2": "to be brought back by back of s", "c2": "to be brought back by back of s"}
    planned = plan(facts(versions, needed=needed), replace(KEEP_TWO, max_storage=1), NOW)
    assert removed(planned) == "c3 c4 c5 m3 m4 m5"
    assert why(planned, "c1") == "version 1 of s is pinned"
    assert why(planned, "m2") == "to be brought back by back of s"
    assert planned.short_of == 9 * SIZE - 1


def test_an_uncommitted_artifact_waits_an_hour_for_its_commit() -> None:
    fresh = StoredArtifact("fresh", SIZE, NOW - UNCOMMITTED_GRACE + timedelta(seconds=1))
    stale = StoredArtifact("stale", SIZE, NOW - UNCOMMITTED_GRACE)
    planned = plan(facts(chain(1), fresh, stale), KEEP_TWO, NOW)
    assert removed(planned) == "stale"
    assert why(planned, "stale") == "sealed more than an hour ago and committed by nobody"


def test_content_of_an_old_version_that_is_sealed_again_waits_like_new_content() -> None:
    again = facts(chain(5), StoredArtifact("m1", SIZE, NOW - timedelta(minutes=1)))
    assert removed(plan(again, KEEP_TWO, NOW)) == "c1 c2 m2"
    assert removed(plan(again, KEEP_TWO, NOW + UNCOMMITTED_GRACE)) == "c1 c2 m1 m2"


@pytest.mark.parametrize(
    ("max_storage", "gone", "short_of"),
    [
        (13 * SIZE, "", 0),
        (13 * SIZE - 1, "c1 m1", 0),
        (11 * SIZE, "c1 m1", 0),
        (8 * SIZE, "c1 c2 c3 m1 m2 m3", 0),
        (5 * SIZE, "c1 c2 c3 c4 m1 m2 m3 m4", 0),
        (4 * SIZE, "c1 c2 c3 c4 m1 m2 m3 m4", SIZE),
    ],
)
def test_a_storage_bound_takes_the_oldest_first_and_no_more_than_it_must(
    max_storage: int, gone: str, short_of: int
) -> None:
    """Seven versions: 13 artifacts, of which the head's, its parent's and the base model, 5, are protected."""
    planned = plan(facts(chain(7)), replace(KEEP_TWO, keep=9, max_storage=max_storage), NOW)
    assert (removed(planned), planned.short_of) == (gone, short_of)


def test_a_floor_of_free_space_takes_what_is_missing() -> None:
    planned = plan(facts(chain(7), free=900), replace(KEEP_TWO, keep=9, min_free=1000), NOW)
    assert removed(planned) == "c1 m1"
    assert why(planned, "c1") == "version 1 of s makes room: min_free_space"
    assert removed(plan(facts(chain(7), free=1000), replace(KEEP_TWO, keep=9, min_free=1000), NOW)) == ""


def test_what_the_policy_removes_anyway_counts_towards_a_bound() -> None:
    planned = plan(facts(chain(7), free=0), replace(KEEP_TWO, keep=3, min_free=6 * SIZE), NOW)
    assert (removed(planned), planned.short_of) == ("c1 c2 c3 m1 m2 m3", 0)


def test_a_shared_digest_makes_room_only_when_its_last_user_goes() -> None:
    versions = chain(6)
    versions[2] = replace(versions[2], model_digest="m1")
    planned = plan(facts(versions), replace(KEEP_TWO, keep=9, max_storage=9 * SIZE), NOW)
    assert removed(planned) == "c1"
    planned = plan(facts(versions), replace(KEEP_TWO, keep=9, max_storage=9 * SIZE - 1), NOW)
    assert removed(planned) == "c1 c2 m1"


BEST_TWO = replace(KEEP_TWO, policy=Policy.BEST_REWARD)


def rewarded(rewards: list[float | None], scenario: str = "s") -> list[VersionBytes]:
    return [replace(v, reward=r) for v, r in zip(chain(len(rewards), scenario), rewards, strict=True)]


def test_the_best_rewarded_are_kept_and_the_unmeasured() -> None:
    planned = plan(facts(rewarded([None, 0.9, 0.1, None, 0.5, 0.2, 0.3, None])), BEST_TWO, NOW)
    assert removed(planned) == "c2 c5 m2 m5"
    assert why(planned, "m1") == "among the 2 best rewarded checkpoints of s"
    assert why(planned, "m3") == "the reward of version 3 of s was not measured"
    assert why(planned, "m2") == "version 2 of s is not among the 2 best rewarded checkpoints"


def test_of_equal_rewards_the_newer_is_kept() -> None:
    assert removed(plan(facts(rewarded([None, 0.5, 0.5, 0.5, None, None])), BEST_TWO, NOW)) == "c1 m1"


def test_a_bound_takes_the_worst_first_and_the_unmeasured_last_whatever_the_scale_of_a_scenario() -> None:
    small = rewarded([None, 0.9, 0.1, None, None, None])
    large = [
        replace(v, model_digest=f"t{v.model_digest}", checkpoint_digest=f"t{v.checkpoint_digest}" if v.number else None)
        for v in rewarded([None, 50.0, 90.0, None, None, None], "t")
    ]
    both = facts([*small, *large])
    total = len(both.artifacts) * SIZE
    models = [
        [digest for digest in plan(both, replace(BEST_TWO, max_storage=bound), NOW).removed if "m" in digest]
        for bound in (total, total - 4 * SIZE, total - 8 * SIZE, total - 12 * SIZE)
    ]
    assert models == [
        [],
        ["m2", "tm1"],
        ["m1", "m2", "tm1", "tm2"],
        ["m1", "m2", "m3", "tm1", "tm2", "tm3"],
    ]


TIMES = st.integers(0, 120).map(lambda minutes: NOW - timedelta(minutes=minutes))
DIGESTS = st.sampled_from([f"d{i}" for i in range(8)])


@st.composite
def chains(draw: st.DrawFn) -> list[VersionBytes]:
    versions: list[VersionBytes] = []
    for scenario in ("s", "t"):
        for number in range(draw(st.integers(1, 7))):
            checkpoint = draw(st.none() | DIGESTS) if number else None
            is_durable = checkpoint is not None or number == 0 or draw(st.integers(0, 9)) == 0
            reward = draw(st.none() | st.floats(-1, 1))
            pinned = draw(st.integers(0, 9)) == 0
            versions.append(
                VersionBytes(scenario, number, is_durable, draw(DIGESTS), checkpoint, draw(TIMES), pinned, reward)
            )
    return versions


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        draw(st.sampled_from(Policy)),
        draw(st.integers(1, 4)),
        max_storage=draw(st.integers(0, 10 * SIZE)),
        min_free=draw(st.integers(0, 5 * SIZE)),
    )


@given(chains(), rules(), st.lists(st.integers(0, 120), min_size=9, max_size=9), st.sets(DIGESTS, max_size=2))
def test_no_plan_touches_what_the_loop_needs(
    versions: list[VersionBytes], wanted: Rules, ages: list[int], needed: set[str]
) -> None:
    artifacts = [StoredArtifact(f"d{i}", SIZE, NOW - timedelta(minutes=age)) for i, age in enumerate(ages)]
    given_facts = Facts(versions, artifacts, dict.fromkeys(needed, "a job"), free=SIZE)
    planned = plan(given_facts, wanted, NOW)
    gone = set(planned.removed)
    assert not gone & needed
    for scenario in ("s", "t"):
        own = [version for version in versions if version.scenario == scenario]
        newest_checkpoint = [version for version in own if version.is_durable][-1]
        for version in [*own[-2:], newest_checkpoint, *(v for v in own if v.is_pinned)]:
            assert not gone & set(version.digests)
        assert own[0].model_digest not in gone
    for artifact in artifacts:
        if artifact.digest in gone and artifact.sealed_at > NOW - UNCOMMITTED_GRACE:
            users = [v for v in versions if artifact.digest in v.digests]
            assert max(version.committed_at for version in users) >= artifact.sealed_at
    left = [artifact for artifact in artifacts if artifact.digest not in gone]
    missing = max(len(left) * SIZE - wanted.max_storage, wanted.min_free - SIZE - len(gone) * SIZE)
    assert planned.short_of == max(0, missing)
    again = plan(replace(given_facts, artifacts=left, free=SIZE + len(gone) * SIZE), wanted, NOW)
    assert again.removed == ()
