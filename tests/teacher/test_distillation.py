"""A small student learns from a larger teacher of another architecture, served chats to committed version."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
import transformers
from atoll.api.teacher.v1 import teacher_service_pb2, teacher_service_pb2_grpc

from tests.e2e.live_stack import AUTHORIZATION, TOKEN, LiveStack
from tests.engines import START_SECONDS, VOCAB_SIZE, RunningEngine, free_port

SAMPLES = 4


@pytest.fixture(scope="module")
def larger_model(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers and other widths with the student's tokenizer; the student is a Qwen3 of two."""
    directory = tmp_path_factory.mktemp("larger") / "model"
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).float().save_pretrained(directory)
    for file in (tiny_models / "student").iterdir():
        if "token" in file.name or file.name.startswith("chat_template"):
            shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def teacher(larger_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a teacher with an engine of its own."""
    port, log = free_port(), tmp_path_factory.mktemp("teacher") / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | {
        "ATOLL_TEACHER_PORT": str(port),
        "ATOLL_TEACHER_MODEL_PATH": str(larger_model),
        "ATOLL_TEACHER_ENGINE_PORT": str(free_port()),
        "ATOLL_ENGINE_DEVICE": "cpu",
        "ATOLL_TOKEN": TOKEN,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.teacher"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while b'"event": "teacher ready"' not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def told(teacher: str) -> teacher_service_pb2.GetTeacherResponse:
    with grpc.insecure_channel(teacher) as channel:
        stub = teacher_service_pb2_grpc.TeacherServiceStub(channel)
        return stub.GetTeacher(teacher_service_pb2.GetTeacherRequest(verify=True), metadata=AUTHORIZATION, timeout=60)


@pytest.mark.slow
def test_a_student_trains_from_served_chats_with_a_larger_teacher_behind_the_service(
    tmp_path: Path, tiny_models: Path, student_engine: RunningEngine, teacher: str
) -> None:
    stack = LiveStack(
        tmp_path / "run",
        tiny_models / "student",
        engine_url=student_engine.base_url,
        vars__family="opd",
        vars__options=json.dumps({"batch_size": SAMPLES}),
        vars__engines=json.dumps([student_engine.base_url]),
        services__engine__command="[sleep, infinity]",
        services__engine__ready="null",
        services__trainer__env__ATOLL_TRAINER_TEACHER=teacher,
    )
    try:
        stack.start()
        for number in range(SAMPLES):
            chat = stack.chat(f"Question {number}?")
            answer = stack.http.post("/atoll/report", json={"receipt": chat.receipt, "request_id": f"r-{number}"})
            assert answer.status_code == 200, answer.text
        stack.wait_until_served(1)
        head = stack.versions()[-1]
    finally:
        stack.close()
    assert head.metrics["perf/distill_teacher_time"] > 0
    assert head.metrics["train/grad_norm"] > 0
    assert told(teacher).sequences_scored == SAMPLES
