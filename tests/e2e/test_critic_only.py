"""A job that trains the critic alone, through the whole loop: a version that is served before anybody publishes it."""

import json
from pathlib import Path

import grpc
import pytest
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2, trainer_service_pb2_grpc

from tests.e2e.live_stack import AUTHORIZATION, VERSION_SECONDS, Chat, LiveStack, wait_for
from tests.e2e.test_families import beside
from tests.engines import RunningEngine

SAO = {"batch_size": 2, "eps_clip_high": 5.0, "num_critic_only_steps": 1}


def report_both(stack: LiveStack, chats: list[Chat]) -> str:
    """The job that two reports form."""
    for number, chat in enumerate(chats):
        body = {"receipt": chat.receipt, "score": float(number), "request_id": f"r-{chat.receipt}"}
        answer = stack.http.post("/atoll/report", json=body)
        assert answer.status_code == 200, answer.text
    return str(answer.json()["job_id"])


def served(stack: LiveStack, job_id: str) -> job_pb2.Job:
    """The job once it is over."""
    with grpc.insecure_channel(stack.address("trainer")) as channel:
        stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)

        def submitted() -> bool:
            listed = stub.ListJobs(trainer_service_pb2.ListJobsRequest(), metadata=AUTHORIZATION, timeout=30)
            return job_id in {job.job_id for job in listed.jobs}

        wait_for(submitted, "the gateway submits the job", VERSION_SECONDS)
        request = trainer_service_pb2.WatchJobRequest(job_id=job_id)
        for answer in stub.WatchJob(request, metadata=AUTHORIZATION, timeout=VERSION_SECONDS):
            job = answer.job
    assert job.state == job_pb2.JOB_STATE_SERVED, job.message
    return job


@pytest.mark.slow
def test_a_job_of_the_critic_alone_changes_no_weights_publishes_nothing_and_makes_no_sample_stale(
    tmp_path: Path, tiny_models: Path, student_engine: RunningEngine
) -> None:
    stack = LiveStack(
        tmp_path / "run",
        tiny_models / "student",
        vars__family="sao",
        vars__options=json.dumps(SAO),
        engine_url=student_engine.base_url,
        **beside(student_engine),
    )
    try:
        stack.start()
        chats = [stack.chat(f"Question {number}?") for number in range(4)]
        wait_for(lambda: stack.served_version() == "1:0", "the engine serves version 0", VERSION_SECONDS)

        first = served(stack, report_both(stack, chats[:2]))
        assert first.version == 1
        assert first.metrics["sao/critic_only"] == 1
        assert "critic/loss" in first.metrics
        assert "train/learning_rate" not in first.metrics
        base, head = stack.versions()
        assert head.model_digest == base.model_digest
        assert head.checkpoint_digest
        assert stack.served_version() == "1:0"
        # Chat goes on under the name that the engine has for these weights, and so does feedback on what is older.
        later = stack.chat("And now?")
        assert later.weight_version == "1:0"

        second = served(stack, report_both(stack, [chats[2], later]))
        assert second.version == 2
        assert second.metrics["sao/critic_only"] == 0
        assert second.metrics["staleness/samples_fresh"] == 2
        assert stack.versions()[2].model_digest != head.model_digest
        assert stack.served_version() == "1:2"
        assert stack.chat("And then?").weight_version == "1:2"
    finally:
        stack.close()
