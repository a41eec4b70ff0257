"""Training jobs and rollbacks over HTTP: read and cancelled at, and handed to, whichever trainer holds the lease."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import UTC
from typing import TypeVar

import grpc
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common import pages
from atoll.common.errors import REASON_PREFIX, AtollError, Conflict, NotFound, Unavailable
from atoll.common.names import new_id
from atoll.common.rpc_errors import from_rpc_error
from atoll.gateway.records import JsonObject
from atoll.gateway.schema_errors import validated
from atoll.gateway.strict_json import parse_object
from atoll.gateway.trainer_client import state_word
from atoll.gateway.trainers import Stub, Trainers
from pydantic import BaseModel, ConfigDict, Field

CALL_SECONDS = 10.0

T = TypeVar("T")


class RollbackRequest(BaseModel):
    """Body of POST /atoll/scenarios/{s}/rollback. Example: {"version": 3, "request_id": "my-retry-key"}"""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: int = Field(ge=0, le=2**62)
    request_id: str = Field("", max_length=64)
    """The same id with the same version is the same rollback; empty: a retry is a second one."""


class CancelRequest(BaseModel):
    """Body of POST /atoll/scenarios/{s}/jobs/{id}/cancel: {}, or nothing at all."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Jobs:
    """Every method raises Unavailable while no trainer of the scenario answers, and NOT_TRAINED_HERE."""

    def __init__(self, trainers: Trainers | None) -> None:
        self._trainers = trainers

    async def list(self, scenario: str, page_size: int, page_token: str) -> tuple[list[job_pb2.Job], str]:
        """A page of the scenario's jobs, newest first, and the token of the next. Raises InvalidInput."""
        request = trainer_service_pb2.ListJobsRequest(page_size=pages.page_size(page_size), page_token=page_token)
        answer = await self._ask_holder(scenario, lambda stub: stub.ListJobs(request, timeout=CALL_SECONDS))
        return list(answer.jobs), answer.next_page_token

    async def get(self, scenario: str, job_id: str) -> job_pb2.Job:
        """Raises NotFound(JOB_NOT_FOUND)."""
        request = trainer_service_pb2.GetJobRequest(job_id=job_id)
        job = (await self._ask_holder(scenario, lambda stub: stub.GetJob(request, timeout=CALL_SECONDS))).job
        if job.scenario != scenario:
            raise NotFound(
                f"no job {job_id[:80]!r} of scenario {scenario}", reason=errors_pb2.REASON_JOB_NOT_FOUND, field="job_id"
            )
        return job

    async def cancel(self, scenario: str, job_id: str, raw: bytes) -> job_pb2.Job:
        """Ends a job that is not staged yet; a cancelled one is answered again.

        Raises NotFound(JOB_NOT_FOUND), Conflict(JOB_NOT_CANCELLABLE), NOT_LEASE_HOLDER, and InvalidInput.
        """
        validated(CancelRequest, parse_object(raw or b"{}"))
        request = trainer_service_pb2.CancelJobRequest(job_id=job_id)
        # The call names no scenario, and another scenario's trainer must not be asked.
        return (await self._ask_holder(scenario, lambda stub: stub.CancelJob(request, timeout=CALL_SECONDS))).job

    async def rollback(self, scenario: str, raw: bytes) -> job_pb2.Job:
        """Queues the return to a version. Raises what SubmitRollback does, REQUEST_ID_REUSED, and InvalidInput."""
        asked = validated(RollbackRequest, parse_object(raw))
        request = trainer_service_pb2.SubmitRollbackRequest(
            job_id=rollback_job_id(scenario, asked.request_id or new_id()), scenario=scenario, version=asked.version
        )
        try:
            answer = await self._known().ask(scenario, lambda stub: stub.SubmitRollback(request, timeout=CALL_SECONDS))
        except AtollError as error:
            if error.reason != errors_pb2.REASON_JOB_ID_REUSED:
                raise
            raise Conflict(
                f"request_id {asked.request_id!r} asked for another version before; use a new id",
                reason=errors_pb2.REASON_REQUEST_ID_REUSED,
                field="request_id",
            ) from None
        return answer.job

    async def _ask_holder(self, scenario: str, call: Callable[[Stub], Awaitable[T]]) -> T:
        stub = await self._known().stub_of(scenario, CALL_SECONDS)
        try:
            return await call(stub)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _known(self) -> Trainers:
        if self._trainers is None:
            raise Unavailable("this gateway has no trainer: set ATOLL_GATEWAY_TRAINER to its host:port")
        return self._trainers


def rollback_job_id(scenario: str, request_id: str) -> str:
    """Stable over retries. Example: "rollback-1a2b...", 41 characters."""
    identity = json.dumps(["http", scenario, request_id], separators=(",", ":"))
    return "rollback-" + hashlib.sha256(identity.encode()).hexdigest()[:32]


def job_as_json(job: job_pb2.Job) -> JsonObject:
    """Example: {"job_id": "job-1a...", "kind": "training", "state": "running", "reason": null, "attempt": 1, ...}"""
    reason = errors_pb2.Reason.Name(job.reason).removeprefix(REASON_PREFIX).lower() if job.reason else None
    return {
        "job_id": job.job_id,
        "scenario": job.scenario,
        "kind": "rollback" if job.HasField("restores") else "training",
        "family": job.family or None,
        "state": state_word(job),
        "reason": reason,
        "message": job.message or None,
        "attempt": job.attempt,
        "version": job.version if job.HasField("version") else None,
        "restores": job.restores if job.HasField("restores") else None,
        "samples": list(job.sample_ids),
        "rejected_samples": list(job.rejected_sample_ids),
        "metrics": dict(job.metrics),
        "created_at": job.create_time.ToDatetime(tzinfo=UTC).isoformat() if job.HasField("create_time") else None,
        "updated_at": job.update_time.ToDatetime(tzinfo=UTC).isoformat() if job.HasField("update_time") else None,
        "revision": job.revision,
    }
