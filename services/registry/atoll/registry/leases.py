"""Leases: who may act for a scenario. Tokens only grow, so that a write of a holder that was replaced can be told.

free --acquire--> held --renew--> held --ttl passes, or release--> lapsed --acquire--> held, with the next token
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import Conflict, InvalidInput
from atoll.common.failpoints import reached
from atoll.common.names import check_id
from atoll.registry import tables
from atoll.registry.database import Database
from atoll.registry.scenario_lock import find_scenario, lock_scenario
from atoll.registry.types import utc_now

TRAINER = "trainer"
"""The role whose token commits and job records carry."""

MIN_TTL = timedelta(seconds=1)
MAX_TTL = timedelta(hours=1)
MAX_ADDRESS = 255

_LEASES = tables.leases


@dataclass(frozen=True)
class Lease:
    """A lease as it stands; lapsed when `remaining` is not positive.

    Example: Lease("support", "trainer", "5f0c...", "10.0.0.7:7420", fencing_token=3, remaining=timedelta(seconds=12))
    """

    scenario: str
    role: str
    holder: str
    address: str
    fencing_token: int
    remaining: timedelta

    @property
    def is_held(self) -> bool:
        return self.remaining > timedelta(0)


class Leases:
    """Gives, extends and ends leases. clock: what time it is; lapses are judged by it alone."""

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._clock = clock

    def acquire(self, scenario: str, role: str, holder: str, address: str, ttl: timedelta) -> Lease:
        """Takes the lease unless somebody else has it, and returns it as it stands: compare the holder.

        Raises InvalidInput and NotFound(SCENARIO_NOT_FOUND).
        """
        _check_names(scenario, role, holder)
        _check_ttl(ttl)
        if not 0 < len(address) <= MAX_ADDRESS or not address.isprintable():
            raise InvalidInput(
                f"address is {address[:80]!r}, expected where the holder is reached, e.g. '10.0.0.7:7420'",
                field="address",
            )
        with self._database.write() as connection:
            lock_scenario(connection, scenario)
            # After the lock: waiting for it is no part of the ttl, and a lapse meanwhile counts.
            now = self._clock()
            known = _find(connection, scenario, role, now)
            if known is not None and known.is_held and known.holder != holder:
                return known
            if known is None or not known.is_held:
                token = 1 if known is None else known.fencing_token + 1
            else:
                token = known.fencing_token
            lease = Lease(scenario, role, holder, address, token, ttl)
            _put(connection, lease, now + ttl, is_new=known is None)
        reached("registry.leased")
        return lease

    def renew(self, scenario: str, role: str, holder: str, fencing_token: int, ttl: timedelta) -> Lease:
        """Extends a lease that the holder still has. Raises InvalidInput, NotFound(SCENARIO_NOT_FOUND) and
        Conflict(LEASE_LOST)."""
        _check_names(scenario, role, holder)
        _check_ttl(ttl)
        with self._database.write() as connection:
            lock_scenario(connection, scenario)
            now = self._clock()
            known = _find(connection, scenario, role, now)
            if known is None or (known.holder, known.fencing_token) != (holder, fencing_token) or not known.is_held:
                raise _lost(scenario, role, fencing_token, known)
            lease = Lease(scenario, role, holder, known.address, fencing_token, ttl)
            _put(connection, lease, now + ttl, is_new=False)
            return lease

    def release(self, scenario: str, role: str, holder: str) -> None:
        """Lets the lease lapse now; one that the holder does not have is no error. Raises InvalidInput and
        NotFound(SCENARIO_NOT_FOUND)."""
        _check_names(scenario, role, holder)
        with self._database.write() as connection:
            lock_scenario(connection, scenario)
            now = self._clock()
            known = _find(connection, scenario, role, now)
            if known is not None and known.holder == holder and known.is_held:
                _put(connection, known, now, is_new=False)

    def get(self, scenario: str, role: str) -> Lease | None:
        """The lease as it stands, None when nobody ever had it. Raises NotFound(SCENARIO_NOT_FOUND), InvalidInput."""
        _check_names(scenario, role)
        with self._database.read() as connection:
            find_scenario(connection, scenario)
            return _find(connection, scenario, role, self._clock())


def check_fencing_token(connection: sa.Connection, scenario: str, token: int) -> None:
    """Raises Conflict(FENCED) unless this is the newest token of the trainer's lease; 0 while there never was one. A
    lapse alone fences nobody: nobody else has come. Call it under the scenario's lock."""
    lease = _LEASES.c
    query = sa.select(lease.fencing_token, lease.holder, lease.address).where(
        lease.scenario_id == scenario, lease.role == TRAINER
    )
    newest = connection.execute(query).one_or_none()
    current = 0 if newest is None else newest.fencing_token
    if token != current:
        whose = "nobody ever had the lease" if newest is None else f"given to {newest.holder} at {newest.address}"
        raise Conflict(
            f"fencing_token is {token}, the newest of scenario {scenario} is {current} ({whose}): acquire the lease, "
            "read the head again and go on from there",
            reason=errors_pb2.REASON_FENCED,
            field="fencing_token",
        )


def _find(connection: sa.Connection, scenario: str, role: str, now: datetime) -> Lease | None:
    query = sa.select(_LEASES).where(_LEASES.c.scenario_id == scenario, _LEASES.c.role == role)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return Lease(scenario, role, row.holder, row.address, row.fencing_token, row.expires_at - now)


def _put(connection: sa.Connection, lease: Lease, expires_at: datetime, *, is_new: bool) -> None:
    values = {
        "holder": lease.holder,
        "address": lease.address,
        "fencing_token": lease.fencing_token,
        "expires_at": expires_at,
    }
    if is_new:
        connection.execute(_LEASES.insert().values(scenario_id=lease.scenario, role=lease.role, **values))
    else:
        mine = (_LEASES.c.scenario_id == lease.scenario) & (_LEASES.c.role == lease.role)
        connection.execute(_LEASES.update().where(mine).values(**values))


def _check_names(scenario: str, role: str, holder: str | None = None) -> None:
    check_id(scenario, "scenario")
    check_id(role, "role")
    if holder is not None:
        check_id(holder, "holder")


def _check_ttl(ttl: timedelta) -> None:
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise InvalidInput(f"ttl is {ttl.total_seconds()} s, expected 1 s to 1 h", field="ttl")


def _lost(scenario: str, role: str, token: int, known: Lease | None) -> Conflict:
    if known is None:
        state = "nobody ever had it"
    elif known.is_held:
        state = f"{known.holder} at {known.address} has it with token {known.fencing_token}"
    else:
        state = f"token {known.fencing_token} lapsed {-known.remaining.total_seconds():.1f} s ago"
    return Conflict(
        f"the lease {role} of scenario {scenario} cannot be renewed under token {token}: {state}; acquire it again",
        reason=errors_pb2.REASON_LEASE_LOST,
        field="fencing_token",
    )
