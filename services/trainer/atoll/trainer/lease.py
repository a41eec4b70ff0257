"""The right to act for the scenario: acquired from the registry, renewed in time, and given up when it runs out.

```
standby --acquired: a new token--> holder --renewed every ttl/3--> holder
   ^------------------------------- lapsed, refused, released <----'
```
The registry counts by its own clock from when it answers; the holder counts from when it asked, so it stops first.
"""

import asyncio
import time
from collections.abc import Callable

import grpc
import structlog
from atoll.api.errors.v1 import errors_pb2
from atoll.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from atoll.common.errors import AtollError, Unavailable
from atoll.common.names import new_id
from atoll.trainer.calls import answer_of
from atoll.trainer.waiting import set_or_after
from google.protobuf import duration_pb2

ROLE = "trainer"
RENEWALS_PER_TTL = 3
TRIES_PER_TTL = 10
"""How often a registry that does not answer is asked."""

log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Keeps one process's lease. Belongs to one event loop; `run_forever` does the asking.

    Nothing may be begun, and no engine touched, unless `held()`. Every write carries the token it was decided under.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        scenario: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        holder: str | None = None,
        predecessor: str = "",
    ) -> None:
        """`holder`: drawn for this process. `predecessor`: one that is dead, whose lease need not run out."""
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(channel)
        self._scenario = scenario
        self._ttl_s = ttl_s
        self._clock = clock
        self._holder = holder or new_id()
        self._predecessor = predecessor
        self._address = ""
        self._token = 0
        self._until = 0.0
        """By `clock`; the lease is held before it."""
        self._holder_address = ""
        self._trouble = ""
        """Why the registry's last answer was none."""
        self._acquired, self._dropped, self._doubted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def held(self) -> bool:
        """Whether this process may act now."""
        return self._clock() < self._until

    @property
    def holder_address(self) -> str:
        """Where whoever holds the lease is reached, as far as this process was told; "" when nobody does."""
        return self._address if self.held() else self._holder_address

    def refuse_unless_held(self) -> None:
        """Raises Unavailable (NOT_LEASE_HOLDER) with the holder's address."""
        if self.held():
            return
        elsewhere = f"{self._holder_address} does" if self._holder_address else "nobody is known to"
        raise Unavailable(
            f"this trainer does not hold the lease of scenario {self._scenario}, {elsewhere}; ask there or again later"
            + (f"; the registry's last answer to it: {self._trouble}" if self._trouble else ""),
            reason=errors_pb2.REASON_NOT_LEASE_HOLDER,
        )

    async def token(self) -> int:
        """The fencing token, once this process holds the lease, however long that takes."""
        while not self.held():
            self._acquired.clear()
            await self._acquired.wait()
        return self._token

    def token_now(self) -> int:
        """The fencing token. Raises Unavailable (NOT_LEASE_HOLDER)."""
        self.refuse_unless_held()
        return self._token

    async def lost(self) -> None:
        """Returns when this process does not hold the lease, or holds it under another token than now."""
        token = self._token
        while token and token == self._token and (left := self._until - self._clock()) > 0:
            await set_or_after(self._dropped, left)

    def doubt(self, token: int) -> None:
        """The registry refused a write under this token: asks again at once whose the lease is."""
        if token == self._token:
            self._drop("a write was fenced")
            self._doubted.set()

    async def run_forever(self, address: str) -> None:
        """Acquires and renews until it is cancelled. `address`: where others reach this trainer, host:port."""
        self._address = address
        while True:
            pause = self._ttl_s / RENEWALS_PER_TTL
            try:
                lease = await self._ask()
            except AtollError as error:
                if error.reason == errors_pb2.REASON_LEASE_LOST:
                    self._drop(error.message)
                    continue
                log.warning("the lease's registry does not answer", error=error.message)
                self._trouble = error.message
                pause = self._ttl_s / TRIES_PER_TTL
            else:
                if lease.holder != self._holder:
                    remaining = lease.remaining.ToNanoseconds() / 1e9
                    pause = min(pause, max(remaining, self._ttl_s / 100))
            if self._token and not self.held():
                self._drop("it ran out")
            await set_or_after(self._doubted, pause)
            self._doubted.clear()

    async def release(self) -> None:
        """Lets another trainer take over at once; one that cannot be told waits for the ttl."""
        self._drop("released")
        try:
            await self._release(self._holder)
        except AtollError as error:
            log.warning("the lease was not released, it runs out by itself", error=error.message)

    @property
    def _call_s(self) -> float:
        return self._ttl_s / RENEWALS_PER_TTL

    async def _release(self, holder: str) -> None:
        request = lease_service_pb2.ReleaseLeaseRequest(scenario=self._scenario, role=ROLE, holder=holder)
        await answer_of(self._stub.ReleaseLease(request, timeout=self._call_s))

    async def _ask(self) -> lease_pb2.Lease:
        """Renews, or acquires what was not held; the lease as it stands."""
        if self._predecessor:
            await self._release(self._predecessor)
            self._predecessor = ""
        sent = self._clock()
        ttl = duration_pb2.Duration()
        ttl.FromNanoseconds(int(self._ttl_s * 1e9))
        if self.held():
            renewal = lease_service_pb2.RenewLeaseRequest(
                scenario=self._scenario, role=ROLE, holder=self._holder, fencing_token=self._token, ttl=ttl
            )
            lease = (await answer_of(self._stub.RenewLease(renewal, timeout=self._call_s))).lease
        else:
            wish = lease_service_pb2.AcquireLeaseRequest(
                scenario=self._scenario, role=ROLE, holder=self._holder, address=self._address, ttl=ttl
            )
            lease = (await answer_of(self._stub.AcquireLease(wish, timeout=self._call_s))).lease
        self._note(lease, sent)
        return lease

    def _note(self, lease: lease_pb2.Lease, sent: float) -> None:
        self._trouble = ""
        if lease.holder != self._holder:
            if self._token:
                self._drop("another trainer holds it")
            if self._holder_address != lease.address:
                log.info("standing by", scenario=self._scenario, holder=lease.address)
            self._holder_address = lease.address
            return
        if lease.fencing_token != self._token:
            log.info("lease acquired", scenario=self._scenario, fencing_token=lease.fencing_token)
        self._token, self._until = lease.fencing_token, sent + self._ttl_s
        self._holder_address = ""
        self._dropped.clear()
        self._acquired.set()

    def _drop(self, why: str) -> None:
        if self._token:
            log.warning("lease lost", scenario=self._scenario, fencing_token=self._token, why=why)
        self._token, self._until = 0, 0.0
        self._dropped.set()
