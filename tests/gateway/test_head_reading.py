"""A head is worked out from the chain alone, whatever of it was heard."""

from atoll.api.registry.v1 import version_pb2
from atoll.gateway.head import LostVersions
from atoll.gateway.head_reading import INCARNATIONS_BACK, head_of

from tests.fakes.scenario_registry import FakeScenarioRegistry

RECOVERY, ROLLBACK = version_pb2.OPERATION_RECOVERY, version_pb2.OPERATION_ROLLBACK


class Chain:
    """Versions 1:0 to 1:7, then what a test adds; `read` counts its calls."""

    def __init__(self) -> None:
        self._registry = FakeScenarioRegistry()
        self._registry.add("math")
        self.incarnation = 1
        self.reads = 0
        self.train(7)

    def train(self, versions: int) -> None:
        for _ in range(versions):
            self._registry.append("math", self.incarnation)

    def begin(self, operation: version_pb2.Operation.ValueType, restores: int) -> None:
        self.incarnation += 1
        self._registry.append("math", self.incarnation, operation=operation, restores=restores)

    @property
    def versions(self) -> list[version_pb2.Version]:
        return self._registry.chains["math"]

    async def read(self, number: int) -> version_pb2.Version:
        self.reads += 1
        return self.versions[number]


async def test_a_gateway_that_starts_after_a_recovery_knows_what_it_lost() -> None:
    chain = Chain()
    chain.begin(RECOVERY, restores=5)
    chain.train(1_000)
    head = await head_of(chain.versions[-1], None, chain.read)
    assert head.lost == (LostVersions(1, first=6, last=7),)
    assert chain.reads < 20


async def test_a_recovery_whose_entry_was_not_heard_of_is_found_from_the_head_before() -> None:
    chain = Chain()
    known = await head_of(chain.versions[-1], None, chain.read)
    chain.begin(RECOVERY, restores=5)
    chain.train(2)
    chain.begin(ROLLBACK, restores=8)
    chain.train(2)
    chain.begin(RECOVERY, restores=12)
    chain.train(3)
    head = await head_of(chain.versions[-1], known, chain.read)
    assert set(head.lost) == {LostVersions(1, 6, 7), LostVersions(3, 13, 13)}
    chain.train(1)
    after = await head_of(chain.versions[-1], head, chain.read)
    assert after.lost == head.lost, "what is known is kept, once"


async def test_a_chain_without_recoveries_is_not_searched() -> None:
    chain = Chain()
    assert (await head_of(chain.versions[-1], None, chain.read)).lost == ()
    assert chain.reads <= 3


async def test_only_so_many_incarnations_are_looked_at() -> None:
    chain = Chain()
    for _ in range(INCARNATIONS_BACK + 3):
        chain.begin(RECOVERY, restores=len(chain.versions) - 2)
    head = await head_of(chain.versions[-1], None, chain.read)
    assert len(head.lost) == INCARNATIONS_BACK
