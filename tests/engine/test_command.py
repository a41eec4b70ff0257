"""What SGLang is started with. That these flags work is shown by every test that uses a real engine."""

import os
from pathlib import Path

import pytest
from atoll.engine.command import SHIMS, sglang_arguments, sglang_environment
from atoll.engine.preflight import ModelFacts
from atoll.engine.settings import Device, EngineSettings

MODEL = Path("/models/base")


def arguments(device: Device, model_context: int = 2048, **values: object) -> list[str]:
    settings = EngineSettings.model_validate({"model_path": MODEL, **values})
    return sglang_arguments(settings, device, MODEL, "1:7", ModelFacts("Qwen3ForCausalLM", model_context, 1024))


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("device", [Device.CPU, Device.CUDA])
def test_every_device_gets_the_version_and_streams_of_deltas(device: Device) -> None:
    started = arguments(device)
    assert value_of(started, "--model-path") == "/models/base"
    assert value_of(started, "--weight-version") == "1:7"
    assert "--incremental-streaming-output" in started


def test_a_gpu_gets_none_of_the_flags_for_a_cpu() -> None:
    started = arguments(Device.CUDA)
    assert "--device" not in started
    assert "--dtype" not in started
    assert "--max-total-tokens" not in started


def test_the_context_on_a_cpu_fits_the_cache() -> None:
    assert value_of(arguments(Device.CPU, 2048), "--context-length") == "2048"
    assert value_of(arguments(Device.CPU, 131072), "--context-length") == "16384"
    assert value_of(arguments(Device.CPU, 131072, context_length=512), "--context-length") == "512"


def test_extra_arguments_are_split_as_by_a_shell_and_come_last() -> None:
    started = arguments(Device.CPU, extra_args="--served-model-name 'two words' --log-level error")
    assert started[-4:] == ["--served-model-name", "two words", "--log-level", "error"]


def test_sglang_does_not_see_our_secrets_and_keeps_the_rest() -> None:
    inherited = {"ATOLL_TOKEN": "s3cret", "LANG": "C.UTF-8", "PYTHONPATH": "/mine", "OMP_NUM_THREADS": "8"}
    settings = EngineSettings.model_validate({"model_path": MODEL})
    environment = sglang_environment(settings, Device.CPU, inherited, Path("/scratch"))
    assert "s3cret" not in environment.values()
    assert environment["LANG"] == "C.UTF-8"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(SHIMS), "/mine"]
    assert environment["OMP_NUM_THREADS"] == "1"
    on_gpu = sglang_environment(settings, Device.CUDA, inherited, Path("/scratch"))
    assert on_gpu["PYTHONPATH"] == "/mine"
    assert on_gpu["OMP_NUM_THREADS"] == "8"


def test_ranks_of_one_machine_meet_in_a_file_and_those_of_several_where_the_operator_says() -> None:
    name, scratch = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", Path("/scratch")
    settings = EngineSettings.model_validate({"model_path": MODEL})
    assert sglang_environment(settings, Device.CPU, {}, scratch)[name] == "file:///scratch/rendezvous"
    assert sglang_environment(settings, Device.CPU, {name: "env://"}, scratch)[name] == "env://"
    several = settings.model_copy(update={"extra_args": "--nnodes 2 --dist-init-addr 10.0.0.1:5000"})
    assert name not in sglang_environment(several, Device.CUDA, {}, scratch)


def test_the_shims_are_where_the_path_points() -> None:
    assert (SHIMS / "sitecustomize.py").is_file()
    assert (SHIMS / "sgl_kernel" / "__init__.py").is_file()
