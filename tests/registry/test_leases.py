from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.registry.app import Registry
from atoll.registry.leases import Lease, Leases
from atoll.registry.settings import RegistrySettings

from tests.registry.material import SCENARIO, content, seal

TTL = timedelta(seconds=15)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(registry: Registry, clock: Clock) -> Iterator[Leases]:
    yield Leases(registry.database, clock)


def acquire(leases: Leases, holder: str, role: str = "trainer") -> Lease:
    return leases.acquire(SCENARIO, role, holder, f"{holder}:7420", TTL)


def test_the_first_holder_gets_token_1_and_the_whole_ttl(leases: Leases) -> None:
    assert leases.get(SCENARIO, "trainer") is None
    lease = acquire(leases, "one")
    assert lease == Lease(SCENARIO, "trainer", "one", "one:7420", 1, TTL)
    assert leases.get(SCENARIO, "trainer") == lease


def test_the_present_holder_keeps_its_token_and_gets_a_new_expiry(leases: Leases, clock: Clock) -> None:
    acquire(leases, "one")
    clock.passes(10)
    lease = acquire(leases, "one")
    assert (lease.fencing_token, lease.remaining) == (1, TTL)


def test_somebody_elses_lease_is_the_answer_and_stays_as_it_is(leases: Leases, clock: Clock) -> None:
    acquire(leases, "one")
    clock.passes(14.9)
    other = acquire(leases, "two")
    assert (other.holder, other.address, other.fencing_token) == ("one", "one:7420", 1)
    assert other.remaining == timedelta(seconds=0.1)
    clock.passes(0.1)
    assert (acquire(leases, "two").holder, acquire(leases, "two").fencing_token) == ("two", 2)


def test_a_lapse_costs_the_same_holder_its_token_too(leases: Leases, clock: Clock) -> None:
    acquire(leases, "one")
    clock.passes(15)
    assert acquire(leases, "one").fencing_token == 2


def test_a_renewal_lasts_from_the_registrys_now(leases: Leases, clock: Clock) -> None:
    acquire(leases, "one")
    clock.passes(14)
    assert leases.renew(SCENARIO, "trainer", "one", 1, TTL).remaining == TTL
    clock.passes(14)
    held = leases.get(SCENARIO, "trainer")
    assert held is not None and held.is_held and held.remaining == timedelta(seconds=1)


@pytest.mark.parametrize(("holder", "token"), [("two", 1), ("one", 0), ("one", 2)])
def test_a_lease_of_another_holder_or_token_is_not_renewed(leases: Leases, holder: str, token: int) -> None:
    acquire(leases, "one")
    with pytest.raises(Conflict, match="one at one:7420 has it with token 1; acquire it again") as refused:
        leases.renew(SCENARIO, "trainer", holder, token, TTL)
    assert refused.value.reason == errors_pb2.REASON_LEASE_LOST


def test_a_lapsed_lease_and_one_that_never_was_are_not_renewed(leases: Leases, clock: Clock) -> None:
    with pytest.raises(Conflict, match="nobody ever had it"):
        leases.renew(SCENARIO, "trainer", "one", 0, TTL)
    acquire(leases, "one")
    clock.passes(16)
    with pytest.raises(Conflict, match=r"token 1 lapsed 1\.0 s ago"):
        leases.renew(SCENARIO, "trainer", "one", 1, TTL)
    lapsed = leases.get(SCENARIO, "trainer")
    assert lapsed is not None and not lapsed.is_held and lapsed.remaining == timedelta(seconds=-1)


def test_a_release_lapses_at_once_and_only_for_its_holder(leases: Leases) -> None:
    leases.release(SCENARIO, "trainer", "one")
    acquire(leases, "one")
    leases.release(SCENARIO, "trainer", "two")
    held = leases.get(SCENARIO, "trainer")
    assert held is not None and held.is_held
    leases.release(SCENARIO, "trainer", "one")
    leases.release(SCENARIO, "trainer", "one")
    assert (acquire(leases, "two").holder, acquire(leases, "two").fencing_token) == ("two", 2)


def test_roles_and_scenarios_are_apart(leases: Leases) -> None:
    acquire(leases, "one")
    assert acquire(leases, "two", role="janitor").holder == "two"
    with pytest.raises(NotFound, match="no scenario 'other'"):
        leases.acquire("other", "trainer", "one", "one:1", TTL)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scenario": "Support"}, "scenario"),
        ({"role": ""}, "role"),
        ({"holder": "One"}, "holder"),
        ({"address": ""}, "address"),
        ({"address": "a\0b"}, "address"),
        ({"ttl": timedelta(seconds=0.9)}, "ttl"),
        ({"ttl": timedelta(hours=2)}, "ttl"),
    ],
)
def test_a_malformed_request_names_its_field(leases: Leases, changes: dict[str, object], field: str) -> None:
    request: dict[str, object] = {
        "scenario": SCENARIO,
        "role": "trainer",
        "holder": "one",
        "address": "one:1",
        "ttl": TTL,
    }
    with pytest.raises(InvalidInput) as refused:
        leases.acquire(**(request | changes))  # type: ignore[arg-type]
    assert refused.value.field == field
    assert leases.get(SCENARIO, "trainer") is None


def test_a_lease_survives_the_registry(registry: Registry, settings: RegistrySettings, clock: Clock) -> None:
    lease = acquire(Leases(registry.database, clock), "one")
    reopened = Registry(settings)
    assert Leases(reopened.database, clock).get(SCENARIO, "trainer") == lease
    reopened.close()


def test_only_the_newest_token_commits_and_a_lapse_alone_fences_nobody(
    registry: Registry, leases: Leases, clock: Clock
) -> None:
    model = seal(registry, b"model").digest
    first = registry.chain.commit(content(0, model), 0)
    acquire(leases, "one")
    refused_codes = []
    for token in (0, 2):
        with pytest.raises(AtollError, match=r"the newest of scenario support is 1 \(given to one") as refused:
            registry.chain.commit(content(1, model), token)
        refused_codes.append(refused.value.code)
    assert refused_codes == ["fenced", "fenced"]
    clock.passes(100)
    second = registry.chain.commit(content(1, model), 1)
    assert (first.fencing_token, second.fencing_token) == (0, 1)
    acquire(leases, "two")
    with pytest.raises(AtollError, match="is 2"):
        registry.chain.commit(content(2, model), 1)
    assert registry.chain.commit(content(1, model), 0) == second, "a replay is answered whatever the token"
    assert registry.chain.commit(content(2, model), 2).number == 3


def test_without_any_lease_only_token_0_commits(registry: Registry) -> None:
    model = seal(registry, b"model").digest
    with pytest.raises(AtollError, match="nobody ever had the lease"):
        registry.chain.commit(content(0, model), 1)


def test_the_lease_of_another_role_fences_no_commit(registry: Registry, leases: Leases) -> None:
    acquire(leases, "one", role="janitor")
    assert registry.chain.commit(content(0, seal(registry, b"model").digest), 0).number == 1
