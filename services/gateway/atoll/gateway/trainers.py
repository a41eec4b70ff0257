"""The trainers of a deployment: one of them holds a scenario's lease, and another one takes over when it dies."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from atoll.common.channels import open_channel
from atoll.common.errors import AtollError, BadConfiguration, Unavailable
from atoll.common.rpc_errors import from_rpc_error

Stub: TypeAlias = "trainer_service_pb2_grpc.TrainerServiceAsyncStub"
"""Only the type checker knows this class."""
T = TypeVar("T")

_ASK_ANOTHER = frozenset({errors_pb2.REASON_NOT_TRAINED_HERE, errors_pb2.REASON_NOT_LEASE_HOLDER})


def trainer_addresses(setting: str) -> tuple[str, ...]:
    """Example: "10.0.0.1:7200,10.0.0.2:7200" is two. Raises BadConfiguration."""
    addresses = tuple(address.strip() for address in setting.split(","))
    if not all(addresses) or len(set(addresses)) != len(addresses):
        raise BadConfiguration(
            f"trainer is {setting!r}, expected host:port, or several different ones with commas between",
            field="ATOLL_GATEWAY_TRAINER",
        )
    return addresses


class Trainers:
    """Asks the trainer that answered last for a scenario, and the others after it when it cannot."""

    def __init__(self, addresses: Sequence[str], token: str | None) -> None:
        """Call it in a running event loop."""
        # Whoever does not answer is not asked again and again: another one may.
        self._channels = [open_channel(address, token, retries=False) for address in addresses]
        self._stubs: list[Stub] = [trainer_service_pb2_grpc.TrainerServiceStub(each) for each in self._channels]
        self._last: dict[str, int] = {}

    @property
    def several(self) -> bool:
        return len(self._stubs) > 1

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def ask(self, scenario: str, call: Callable[[Stub], Awaitable[T]]) -> T:
        """The answer of the first trainer that does not send the caller on.

        Raises the refusal that the one who answered gave; when none did, the last that says more than that a trainer
        is away, else Unavailable.
        """
        refusals: list[AtollError] = []
        first = self._last.get(scenario, 0)
        for turn in range(len(self._stubs)):
            index = (first + turn) % len(self._stubs)
            try:
                answer = await call(self._stubs[index])
            except grpc.RpcError as error:
                refusal = from_rpc_error(error)
                if not (isinstance(refusal, Unavailable) or refusal.reason in _ASK_ANOTHER):
                    self._last[scenario] = index
                    raise refusal from None
                refusals.append(refusal)
            else:
                self._last[scenario] = index
                return answer
        told = [refusal for refusal in refusals if refusal.reason != errors_pb2.REASON_SERVICE_UNAVAILABLE]
        raise (told or refusals)[-1]

    async def stub_of(self, scenario: str, timeout_s: float) -> Stub:
        """A trainer of the scenario that answers, the holder of its lease if there is one.

        Raises Unavailable, Conflict(NOT_TRAINED_HERE).
        """
        standby: Stub | None = None
        elsewhere: list[str] = []
        failure: AtollError | None = None
        for index, stub in enumerate(self._stubs):
            try:
                trainer = await stub.GetTrainer(trainer_service_pb2.GetTrainerRequest(), timeout=timeout_s)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                continue
            if trainer.scenario != scenario:
                elsewhere.append(trainer.scenario)
            elif trainer.lease_holder:
                self._last[scenario] = index
                return stub
            else:
                standby = stub
        if standby is not None:
            return standby
        if failure is not None:
            raise failure
        raise AtollError(
            f"no trainer of this deployment trains {scenario}; they train {', '.join(sorted(set(elsewhere)))}",
            reason=errors_pb2.REASON_NOT_TRAINED_HERE,
            field="scenario",
        )
