"""gRPC: LeaseService."""

import asyncio
from datetime import timedelta

from atoll.api.registry.v1 import lease_pb2
from atoll.api.registry.v1 import lease_service_pb2 as pb
from atoll.api.registry.v1.lease_service_pb2_grpc import LeaseServiceServicer
from atoll.common.errors import InvalidInput
from atoll.common.server import Context
from atoll.registry.leases import Lease, Leases
from google.protobuf import duration_pb2


class LeaseRpc(LeaseServiceServicer):
    """Translates; `Leases` decides."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        lease = await asyncio.to_thread(
            self._leases.acquire, request.scenario, request.role, request.holder, request.address, _ttl(request.ttl)
        )
        return pb.AcquireLeaseResponse(lease=_message(lease))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        lease = await asyncio.to_thread(
            self._leases.renew,
            request.scenario,
            request.role,
            request.holder,
            request.fencing_token,
            _ttl(request.ttl),
        )
        return pb.RenewLeaseResponse(lease=_message(lease))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        await asyncio.to_thread(self._leases.release, request.scenario, request.role, request.holder)
        return pb.ReleaseLeaseResponse()

    async def GetLease(self, request: pb.GetLeaseRequest, context: Context) -> pb.GetLeaseResponse:
        lease = await asyncio.to_thread(self._leases.get, request.scenario, request.role)
        return pb.GetLeaseResponse(lease=None if lease is None else _message(lease))


def _ttl(duration: duration_pb2.Duration) -> timedelta:
    try:
        return duration.ToTimedelta()
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"ttl is no duration: {error}", field="ttl") from None


def _message(lease: Lease) -> lease_pb2.Lease:
    remaining = duration_pb2.Duration()
    remaining.FromTimedelta(lease.remaining)
    return lease_pb2.Lease(
        scenario=lease.scenario,
        role=lease.role,
        holder=lease.holder,
        address=lease.address,
        fencing_token=lease.fencing_token,
        remaining=remaining,
    )
