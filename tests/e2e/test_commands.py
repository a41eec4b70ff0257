"""`atoll versions` and `atoll status` against the real services."""

import json
import os
import subprocess

import pytest

from tests.e2e.live_stack import ATOLL, SCENARIO, TOKEN, LiveStack


def atoll(*words: str, token: str = TOKEN, status: int = 0) -> str:
    """What the command printed; its errors when it was to fail."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    done = subprocess.run(
        [str(ATOLL), *words],
        env=clean | {"ATOLL_TOKEN": token, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def test_versions_shows_the_chain_newest_first(live_stack: LiveStack) -> None:
    chain = live_stack.versions()
    printed = json.loads(atoll("versions", "--registry", live_stack.address("registry"), "--json"))
    assert [version["weight_version"] for version in printed] == [version.weight_version for version in reversed(chain)]
    table = atoll("versions", "--registry", live_stack.address("registry"), "--scenario", SCENARIO)
    assert all(version.model_digest[:12] in table for version in chain)


def test_status_shows_scenarios_and_engines(live_stack: LiveStack) -> None:
    printed = json.loads(atoll("status", "--gateway", live_stack.gateway_url, "--json"))
    assert printed["scenarios"][0]["scenario"] == SCENARIO
    table = atoll("status", "--gateway", live_stack.gateway_url)
    assert SCENARIO in table and live_stack.engine_url in table


@pytest.mark.parametrize("command", ["versions", "status"])
def test_a_wrong_token_is_one_line_and_status_1(live_stack: LiveStack, command: str) -> None:
    place = (
        ("--registry", live_stack.address("registry"))
        if command == "versions"
        else ("--gateway", live_stack.gateway_url)
    )
    said = atoll(command, *place, token="wrong", status=1)
    assert said.startswith("atoll: ") and said.count("\n") == 1
    assert "token" in said


def test_an_unknown_scenario_is_refused_in_one_line(live_stack: LiveStack) -> None:
    said = atoll("versions", "--registry", live_stack.address("registry"), "--scenario", "nowhere", status=1)
    assert "nowhere" in said and said.count("\n") == 1
