"""Flags of the stack's loss family are one more way to write the scenario's options."""

import json
from pathlib import Path

import pytest
from atoll.cli.family_flags import overrides_of
from atoll.cli.stack_file import BUNDLED, find_stack, load_stack
from atoll.common.errors import BadConfiguration
from atoll.families.catalog import make_family
from pydantic import JsonValue

STACK = BUNDLED / "local-cpu.yaml"


def options_of(*words: str) -> dict[str, object]:
    """What the registry is told, by the bundled stack and these words."""
    stack = load_stack(STACK, overrides_of(STACK, words), {"ATOLL_MODEL": "m", "PATH": "/usr/bin"})
    (scenario,) = json.loads(stack.services["registry"].environment({})["ATOLL_REGISTRY_SCENARIOS"])
    options: dict[str, object] = scenario["options"]
    return options


def test_flags_are_laid_over_the_options_of_the_stack() -> None:
    of_file = {"groups_per_step": 2, "n_samples_per_prompt": 8}
    assert options_of() == of_file
    assert options_of("--grpo-eps-clip", "0.1") == {**of_file, "eps_clip": 0.1}
    assert options_of("--grpo-groups-per-step=3", "--grpo-use-tis", "--vars.learning_rate", "1e-3") == {
        "groups_per_step": 3,
        "n_samples_per_prompt": 8,
        "use_tis": True,
    }


def test_flags_say_the_same_as_keys() -> None:
    keys: dict[str, JsonValue] = {"eps_clip": 0.3, "eps_clip_high": 5.0, "length_adaptive_lambda": True}
    flags = ("--sao-eps-clip", "0.3", "--sao-eps-clip-high=5.0", "--sao-length-adaptive-lambda")
    found = options_of("--vars.family", "sao", "--vars.options", "{}", *flags)
    assert found == keys
    assert make_family("sao", json.loads(json.dumps(found))).options == make_family("sao", keys).options


def test_the_options_of_an_override_are_the_ones_laid_over() -> None:
    assert options_of("--vars.options={groups_per_step: 5}", "--grpo-eps-clip", "0.1") == {
        "groups_per_step": 5,
        "eps_clip": 0.1,
    }


def test_a_key_that_is_set_by_its_path_stays_beside_flags() -> None:
    of_flags = ("--grpo-eps-clip", "0.1")
    for words in (("--vars.options.groups_per_step", "5", *of_flags), (*of_flags, "--vars.options.groups_per_step=5")):
        assert options_of(*words) == {"groups_per_step": 5, "n_samples_per_prompt": 8, "eps_clip": 0.1}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--grpo-eps-clipp", "0.1"), "--grpo-eps-clipp; did you mean --grpo-eps-clip"),
        (("--grpo-eps-clip", "much"), "--grpo-eps-clip much: .*number"),
        (("--grpo-eps-clip", "3"), "grpo: eps_clip: .* less than 1, got 3"),
        (("--grpo-eps-clip",), "--grpo-eps-clip needs a value"),
        (("--sao-eps-clip", "0.1"), "--sao-eps-clip: nothing in the stack file is called that"),
        (("--vars.family", "gppo", "--gppo-x", "1"), "no loss family 'gppo'; known: .*grpo"),
        (("--vars.options=[1]", "--grpo-eps-clip", "0.1"), r"vars.options is \[1\], expected a map"),
        (("--vars.options={", "--grpo-eps-clip", "0.1"), "--vars.options: the value '{' is not YAML"),
        (("serve",), "'serve' is not an option of serve"),
        (("--vars.family",), "--vars.family needs a value"),
    ],
)
def test_a_flag_that_says_nothing_is_refused_by_name(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadConfiguration, match=says):
        options_of(*words)


def test_a_stack_without_a_family_has_no_flags(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("run_dir: run\nservices: {registry: {command: [python, -m, atoll.registry]}}\n")
    assert overrides_of(find_stack(str(path)), ["--grpo-eps-clip", "0.1"]) == [("grpo-eps-clip", "0.1")]
    with pytest.raises(BadConfiguration, match="nothing in the stack file is called that"):
        load_stack(path, overrides_of(path, ["--grpo-eps-clip", "0.1"]), {"PATH": "/usr/bin"})
