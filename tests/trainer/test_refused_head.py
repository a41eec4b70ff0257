"""Which heads are given back, by a clock that the test moves."""

from datetime import UTC, datetime, timedelta

import pytest
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.refused_head import HeadWatch

TIMEOUT_S = 600.0


class Watched:
    """A watch that just took the lease, and the heads that it gave back."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.given_back: list[int] = []
        self.watch = HeadWatch("chat", TIMEOUT_S, self.note, lambda: self.time.timestamp(), lambda: self.time)
        self.watch.note_lease(True)

    async def note(self, head: ChainVersion) -> None:
        self.given_back.append(head.number)

    async def look(self, head: ChainVersion, *, refuses: bool) -> None:
        """As the publisher does after an engine answered."""
        self.watch.note_lease(True)
        self.watch.see(head)
        if refuses:
            self.watch.note_refused(head)
            await self.watch.check()

    async def refuse_for(self, head: ChainVersion, seconds: float) -> None:
        """An engine refuses the head at the beginning and at the end of that time."""
        await self.look(head, refuses=True)
        self.time += timedelta(seconds=seconds)
        await self.look(head, refuses=True)

    def head(self, number: int, age_s: float) -> ChainVersion:
        """One that was committed so long ago."""
        committed_at = self.time - timedelta(seconds=age_s)
        return ChainVersion(number, number - 1, WeightVersion(1, number), committed_at=committed_at)


@pytest.mark.parametrize(("age_s", "given_back"), [(0.0, [7]), (599.0, [7]), (601.0, []), (86_400.0, [])])
async def test_a_head_that_stood_for_long_before_this_trainer_is_kept(age_s: float, given_back: list[int]) -> None:
    watched = Watched()
    head = watched.head(7, age_s)
    await watched.refuse_for(head, TIMEOUT_S - 1)
    assert watched.given_back == []
    watched.time += timedelta(seconds=2)
    await watched.look(head, refuses=True)
    assert watched.given_back == given_back


async def test_a_head_that_this_trainer_committed_while_no_engine_answered_is_given_back_however_old() -> None:
    watched = Watched()
    head = watched.head(7, 0.0)
    watched.time += timedelta(days=1)
    await watched.refuse_for(head, TIMEOUT_S)
    assert watched.given_back == [7]


async def test_a_head_of_another_holder_is_as_old_as_it_was_when_the_lease_came_back() -> None:
    watched = Watched()
    watched.watch.note_lease(False)
    watched.time += timedelta(days=1)
    await watched.refuse_for(watched.head(7, 3_600.0), TIMEOUT_S)
    assert watched.given_back == []


async def test_the_head_after_one_that_is_kept_is_watched_as_any_other() -> None:
    watched = Watched()
    await watched.refuse_for(watched.head(7, 86_400.0), TIMEOUT_S)
    await watched.refuse_for(watched.head(8, 0.0), TIMEOUT_S)
    assert watched.given_back == [8]
