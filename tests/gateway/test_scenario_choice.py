"""Header, model field, default: which one names the scenario."""

import pytest
from atoll.common.errors import AtollError
from atoll.gateway.scenario_choice import ScenarioChoice, choose_scenario


def test_the_header_comes_first_then_the_model_field_then_the_default() -> None:
    assert choose_scenario("a", "b", "c") == ScenarioChoice("a", None, "x-atoll-scenario")
    assert choose_scenario(None, "b", "c") == ScenarioChoice("b", None, "model")
    assert choose_scenario(None, None, "c") == ScenarioChoice("c", None, "model")


def test_a_version_is_pinned_in_the_model_field_also_under_a_header() -> None:
    assert choose_scenario(None, "b@3", None) == ScenarioChoice("b", 3, "model")
    assert choose_scenario("b", "b@0", None) == ScenarioChoice("b", 0, "x-atoll-scenario")


@pytest.mark.parametrize(
    ("header", "model", "code"),
    [
        (None, None, "invalid_field"),
        ("a", "b@3", "invalid_field"),
        (None, "", "scenario_not_found"),
        (None, "@3", "scenario_not_found"),
        (None, "Some Model", "scenario_not_found"),
        ("", None, "scenario_not_found"),
        (None, "b@", "version_not_found"),
        (None, "b@-1", "version_not_found"),
        (None, "b@1.5", "version_not_found"),
        (None, "b@" + "9" * 30, "version_not_found"),
        (None, "b@٣", "version_not_found"),
    ],
)
def test_what_names_no_scenario_is_refused(header: str | None, model: str | None, code: str) -> None:
    with pytest.raises(AtollError) as refusal:
        choose_scenario(header, model, None)
    assert refusal.value.code == code and refusal.value.field
