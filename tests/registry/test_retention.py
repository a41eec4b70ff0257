from datetime import UTC, datetime, timedelta

from atoll.registry.retention import UNCOMMITTED_GRACE, StoredArtifact, VersionBytes, plan
from hypothesis import given
from hypothesis import strategies as st

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=30)


def chain(count: int, scenario: str = "s", checkpoints: range | None = None) -> list[VersionBytes]:
    """Versions 0..count-1 with models m0, m1, ... and checkpoints c1, c2, ..."""
    with_checkpoint = range(1, count) if checkpoints is None else checkpoints
    return [
        VersionBytes(scenario, i, i - 1 if i else None, f"m{i}", f"c{i}" if i in with_checkpoint else None, LONG_AGO)
        for i in range(count)
    ]


def stored(versions: list[VersionBytes], *more: StoredArtifact) -> list[StoredArtifact]:
    digests = {d for v in versions for d in (v.model_digest, v.checkpoint_digest) if d is not None}
    return [*(StoredArtifact(digest, LONG_AGO) for digest in sorted(digests)), *more]


def test_versions_older_than_the_newest_lose_their_bytes_but_not_version_0s_model() -> None:
    versions = chain(6)
    assert plan(versions, stored(versions), NOW, keep=2) == ("c1", "c2", "c3", "m1", "m2", "m3")


def test_the_heads_parent_stays_when_one_is_kept() -> None:
    versions = chain(4)
    assert plan(versions, stored(versions), NOW, keep=1) == ("c1", "m1")


def test_nothing_goes_while_there_are_few_versions() -> None:
    versions = chain(3)
    assert plan(versions, stored(versions), NOW, keep=2) == ()


def test_the_newest_checkpoint_in_the_heads_ancestry_stays() -> None:
    versions = chain(6, checkpoints=range(1, 3))
    assert plan(versions, stored(versions), NOW, keep=2) == ("c1", "m1", "m3")


def test_a_digest_that_a_kept_version_shares_stays() -> None:
    versions = chain(5)
    versions[4] = VersionBytes("s", 4, 3, "m1", "c4", LONG_AGO)
    assert plan(versions, stored(versions), NOW, keep=2) == ("c1", "c2", "m2")


def test_a_digest_that_another_scenario_keeps_stays() -> None:
    versions = [*chain(5), VersionBytes("t", 0, None, "m1", None, LONG_AGO)]
    assert plan(versions, stored(versions), NOW, keep=2) == ("c1", "c2", "m2")


def test_an_uncommitted_artifact_waits_an_hour_for_its_commit() -> None:
    fresh = StoredArtifact("fresh", NOW - UNCOMMITTED_GRACE + timedelta(seconds=1))
    stale = StoredArtifact("stale", NOW - UNCOMMITTED_GRACE)
    versions = chain(1)
    assert plan(versions, stored(versions, fresh, stale), NOW, keep=2) == ("stale",)


def test_content_of_an_old_version_that_is_sealed_again_waits_like_new_content() -> None:
    versions = chain(5)
    again = StoredArtifact("m1", NOW - timedelta(minutes=1))
    artifacts = [again if artifact.digest == "m1" else artifact for artifact in stored(versions)]
    assert plan(versions, artifacts, NOW, keep=2) == ("c1", "c2", "m2")
    assert plan(versions, artifacts, NOW + UNCOMMITTED_GRACE, keep=2) == ("c1", "c2", "m1", "m2")


TIMES = st.integers(0, 120).map(lambda minutes: NOW - timedelta(minutes=minutes))
DIGESTS = st.sampled_from([f"d{i}" for i in range(8)])


@st.composite
def chains(draw: st.DrawFn) -> list[VersionBytes]:
    versions: list[VersionBytes] = []
    for scenario in ("s", "t"):
        for number in range(draw(st.integers(1, 7))):
            checkpoint = draw(st.none() | DIGESTS)
            versions.append(
                VersionBytes(scenario, number, number - 1 if number else None, draw(DIGESTS), checkpoint, draw(TIMES))
            )
    return versions


@given(chains(), st.integers(1, 4), st.lists(st.integers(0, 120), min_size=9, max_size=9))
def test_no_plan_touches_what_the_loop_needs(versions: list[VersionBytes], keep: int, ages: list[int]) -> None:
    names = [f"d{i}" for i in range(9)]
    artifacts = [StoredArtifact(n, NOW - timedelta(minutes=age)) for n, age in zip(names, ages, strict=True)]
    removed = set(plan(versions, artifacts, NOW, keep))
    for scenario in ("s", "t"):
        own = [version for version in versions if version.scenario == scenario]
        for version in {*own[-keep:], *own[-2:]}:
            assert not removed & {version.model_digest, version.checkpoint_digest}
        assert own[0].model_digest not in removed
        with_checkpoint = [version for version in own if version.checkpoint_digest is not None]
        if with_checkpoint:
            assert with_checkpoint[-1].checkpoint_digest not in removed
    for artifact in artifacts:
        if artifact.digest in removed and artifact.sealed_at > NOW - UNCOMMITTED_GRACE:
            users = [v for v in versions if artifact.digest in (v.model_digest, v.checkpoint_digest)]
            assert max(version.committed_at for version in users) >= artifact.sealed_at
    assert plan(versions, [artifact for artifact in artifacts if artifact.digest not in removed], NOW, keep) == ()
