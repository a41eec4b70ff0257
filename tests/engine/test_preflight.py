"""Each refusal says what is wrong, where, and what to do; none of them starts SGLang."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration
from atoll.engine.preflight import check_listener, check_model, find_sglang, pick_device
from atoll.engine.settings import Device, EngineSettings

from tests.engines import engine_environment, free_port


def settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate({"model_path": "/models/base", **values})


def test_a_model_that_sglang_serves_is_described(tiny_models: Path) -> None:
    facts = check_model(tiny_models / "student", find_sglang())
    assert facts.architecture == "Qwen3ForCausalLM"
    assert facts.context_length == 2048
    assert facts.vocab_size == 1024


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="absent is not a directory"):
        check_model(tmp_path / "absent", find_sglang())


def test_a_directory_without_a_model_is_refused_and_its_content_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadConfiguration, match=r"no config\.json \(found notes\.txt\)"):
        check_model(tmp_path, find_sglang())


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"architectures": []}', '{"architectures": ["A"]}'])
def test_a_config_that_describes_no_language_model_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadConfiguration, match="does not describe a language model"):
        check_model(tmp_path, find_sglang())


def test_a_directory_without_weights_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_models / "student" / "config.json", tmp_path)
    with pytest.raises(BadConfiguration, match=r"no \.safetensors"):
        check_model(tmp_path, find_sglang())


def test_an_unsupported_architecture_is_refused_with_the_nearest_ones(tiny_models: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models / "student", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen33ForCausalLM"]}))
    with pytest.raises(BadConfiguration, match="Qwen33ForCausalLM, which SGLang cannot serve; it has Qwen3ForCausalLM"):
        check_model(model, find_sglang())


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(BadConfiguration, match="set ATOLL_ENGINE_PORT"):
            check_listener(settings(port=listener.getsockname()[1]))


def test_listening_to_other_machines_needs_a_word(unused_port: int) -> None:
    with pytest.raises(BadConfiguration, match="ATOLL_ENGINE_INSECURE"):
        check_listener(settings(host="0.0.0.0", port=unused_port))
    check_listener(settings(host="0.0.0.0", port=unused_port, insecure=True))


@pytest.fixture
def unused_port() -> int:
    return free_port()


def test_a_missing_sglang_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadConfiguration, match="scripts/install"):
        find_sglang()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_and_auto_takes_the_cpu() -> None:
    assert pick_device(Device.AUTO) is Device.CPU
    with pytest.raises(BadConfiguration, match="set it to cpu"):
        pick_device(Device.CUDA)


def run_engine(*arguments: str, **values: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "atoll.engine", *arguments]
    return subprocess.run(command, env=engine_environment(**values), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "ATOLL_ENGINE_MODEL_PATH"),
        ({"model_path": "/absent"}, "/absent is not a directory"),
        ({"model_path": "/absent", "registry": "127.0.0.1:1", "scenario": "s"}, "set either"),
        ({"registry": "127.0.0.1:1"}, "set together"),
        ({"model_path": "/absent", "weight_version": "latest"}, "ATOLL_ENGINE_WEIGHT_VERSION"),
        ({"model_path": "/absent", "prot": "1"}, "ATOLL_ENGINE_PROT: no such setting"),
    ],
)
def test_the_command_refuses_in_one_line_with_status_2(values: dict[str, object], message: str) -> None:
    result = run_engine(**values)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_lists_every_setting() -> None:
    result = run_engine("--help")
    assert result.returncode == 0
    for name in EngineSettings.model_fields:
        assert name.upper() in result.stdout


def test_an_argument_is_refused() -> None:
    result = run_engine("--port")
    assert result.returncode == 2
    assert "unrecognized arguments: --port" in result.stderr
