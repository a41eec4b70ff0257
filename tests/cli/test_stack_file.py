import json
from pathlib import Path

import pytest
from atoll.cli.stack_file import BUNDLED, Stack, find_stack, load_stack
from atoll.common.errors import BadConfiguration

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
GOOD = """
run_dir: {run_dir}
vars: {{port: 7001, scenarios: [{{scenario_id: demo}}]}}
services:
  registry:
    command: [python, -m, atoll.registry]
    env: {{PORT: "${{vars.port}}", SCENARIOS: "${{vars.scenarios}}", VERBOSE: true, LEVEL: info}}
    ready: {{grpc: "127.0.0.1:${{vars.port}}"}}
  engine:
    command: python -m 'atoll engine'
    cuda: [0, 2]
    ready_timeout: 300
"""


def load(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> Stack:
    path = tmp_path / "stack.yaml"
    path.write_text(text)
    return load_stack(path, overrides, ENVIRONMENT)


def refusal(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        load(tmp_path, text, *overrides)
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


def good(tmp_path: Path) -> str:
    return GOOD.format(run_dir=tmp_path / "run")


def test_values_reach_the_services_with_lists_and_numbers_as_json(tmp_path: Path) -> None:
    environment = load(tmp_path, good(tmp_path)).services["registry"].environment({"PATH": "/bin"})
    assert environment["PORT"] == "7001"
    assert json.loads(environment["SCENARIOS"]) == [{"scenario_id": "demo"}]
    assert (environment["VERBOSE"], environment["LEVEL"]) == ("true", "info")
    assert environment["PATH"].endswith(":/bin"), "the interpreter's own folder comes first"


def test_a_command_may_be_one_text_which_no_shell_reads(tmp_path: Path) -> None:
    assert load(tmp_path, good(tmp_path)).services["engine"].command == ["python", "-m", "atoll engine"]


def test_cuda_lists_the_visible_devices_and_an_empty_list_hides_them(tmp_path: Path) -> None:
    stack = load(tmp_path, good(tmp_path))
    assert stack.services["engine"].environment({})["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "CUDA_VISIBLE_DEVICES" not in stack.services["registry"].environment({})
    hidden = load(tmp_path, good(tmp_path), ("services.engine.cuda", "[]"))
    assert hidden.services["engine"].environment({})["CUDA_VISIBLE_DEVICES"] == ""


def test_a_service_waits_for_the_one_before_it(tmp_path: Path) -> None:
    stack = load(tmp_path, good(tmp_path))
    assert stack.prerequisites("registry") == ()
    assert stack.prerequisites("engine") == ("registry",)


def test_in_a_parallel_stack_a_service_waits_only_for_what_it_names(tmp_path: Path) -> None:
    text = good(tmp_path) + "  gateway: {command: python, after: [registry]}\nparallel: true\n"
    stack = load(tmp_path, text)
    assert stack.prerequisites("engine") == ()
    assert stack.prerequisites("gateway") == ("registry",)


def test_any_value_can_be_overridden_by_its_path(tmp_path: Path) -> None:
    stack = load(
        tmp_path,
        good(tmp_path),
        ("vars.port", "7009"),
        ("services.engine.stop_timeout", "3"),
        ("services.registry.env.NEW", "[1]"),
        ("services.registry.command.2", "other"),
    )
    assert stack.services["registry"].ready and stack.services["registry"].ready.grpc == "127.0.0.1:7009"
    assert stack.services["engine"].stop_timeout == 3
    assert stack.services["registry"].environment({})["NEW"] == "[1]"
    assert stack.services["registry"].command == ["python", "-m", "other"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("vars.prot", "1", "--vars.prot: nothing in the stack file is called that"),
        ("services.engin.stop_timeout", "1", "--services.engin.stop_timeout: the stack file has no services.engin"),
        ("services.engine.stop_timout", "1", "services.engine.stop_timout: no such key"),
        ("services.engine.command", "{", "--services.engine.command: the value '{' is not YAML"),
    ],
)
def test_an_override_that_would_change_nothing_is_refused(tmp_path: Path, path: str, value: str, said: str) -> None:
    assert refusal(tmp_path, good(tmp_path), (path, value))[0].startswith(said)


def test_every_problem_of_a_file_is_told_at_once_with_its_path(tmp_path: Path) -> None:
    text = """
run_dir: 7
retries: 3
services:
  a: {command: [no-such-program-of-ours], ready: {tcp: "127.0.0.1"}}
  b: {comand: python, ready_timeout: soon, env: {X: "${NOT_SET}"}}
  c: {command: python, ready: {tcp: "h:1", http: "http://h"}, stop_timeout: 0}
"""
    said = refusal(tmp_path, text)
    paths = [line.partition(":")[0] for line in said]
    assert sorted(paths) == [
        "retries",
        "run_dir",
        "services.a.ready.tcp",
        "services.b.comand",
        "services.b.command",
        "services.b.env.X",
        "services.b.ready_timeout",
        "services.c.ready",
        "services.c.stop_timeout",
    ]


def test_missing_programs_and_bad_prerequisites_are_told(tmp_path: Path) -> None:
    text = """
run_dir: r
services:
  a: {command: [no-such-program-of-ours], after: [b]}
  b: {command: python, after: [zoo], ready: {command: also-not-there}}
"""
    assert refusal(tmp_path, text) == [
        "services.a.command: there is no program 'no-such-program-of-ours'",
        "services.a.after: 'b' does not stand before it in the file",
        "services.b.ready.command: there is no program 'also-not-there'",
        "services.b.after: there is no service 'zoo'; there are a, b",
    ]


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="'a' is written twice"):
        load(tmp_path, "run_dir: r\nservices:\n  a: {command: python}\n  a: {command: sh}\n")


def test_run_dir_is_absolute_for_everybody_who_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stack = load(tmp_path, 'run_dir: r\nservices: {a: {command: python, env: {D: "${run_dir}/d"}}}\n')
    assert stack.run_dir == tmp_path / "r"
    assert stack.services["a"].env == {"D": f"{tmp_path}/r/d"}


def test_a_stack_that_is_nowhere_is_refused_with_the_bundled_names(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="local-cpu"):
        find_stack(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_stack_that_comes_with_atoll_is_valid(path: Path) -> None:
    assert load_stack(path, (), {**ENVIRONMENT, "ATOLL_MODEL": "model"}).services
