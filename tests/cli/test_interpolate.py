import pytest
from atoll.cli.interpolate import Interpolated, interpolate


def filled(document: object, **environment: str) -> object:
    result = interpolate(document, environment)  # type: ignore[arg-type]
    assert not result.problems
    return result.document


def complaint(document: object, **environment: str) -> str:
    result: Interpolated = interpolate(document, environment)  # type: ignore[arg-type]
    (problem,) = result.problems
    return str(problem)


def test_a_variable_comes_from_the_environment() -> None:
    assert filled({"a": "x-${NAME}-y"}, NAME="n") == {"a": "x-n-y"}


def test_a_default_is_used_only_when_the_variable_is_not_set() -> None:
    assert filled({"a": "${NAME:-d}"}) == {"a": "d"}
    assert filled({"a": "${NAME:-d}"}, NAME="n") == {"a": "n"}
    assert filled({"a": "${NAME:-}"}) == {"a": ""}


def test_an_unset_variable_without_a_default_is_named_with_the_key_that_wants_it() -> None:
    said = complaint({"services": {"web": {"env": {"MODEL": "${MODEL_DIR}"}}}})
    assert said.startswith("services.web.env.MODEL: ") and "MODEL_DIR is not set" in said


def test_a_path_reference_alone_keeps_the_type_of_its_value() -> None:
    assert filled({"ports": {"web": 80}, "list": [1, {"x": 2}], "a": "${ports.web}", "b": "${list}"}) == {
        "ports": {"web": 80},
        "list": [1, {"x": 2}],
        "a": 80,
        "b": [1, {"x": 2}],
    }


def test_a_path_reference_inside_a_text_becomes_text() -> None:
    assert filled({"port": 80, "on": True, "a": "http://h:${port}/${on}", "items": ["p"], "b": "${items.0}"}) == {
        "port": 80,
        "on": True,
        "a": "http://h:80/true",
        "items": ["p"],
        "b": "p",
    }


def test_references_may_refer_to_references() -> None:
    assert filled({"a": "${b}/x", "b": "${c}", "c": "${HOME_DIR}"}, HOME_DIR="h") == {
        "a": "h/x",
        "b": "h",
        "c": "h",
    }


def test_a_circle_is_a_problem_and_shows_its_way() -> None:
    result = interpolate({"a": "${b}", "b": "${a}"}, {})
    assert [problem.path for problem in result.problems] == ["a", "b"]
    assert "a -> b -> a" in result.problems[0].message


def test_a_path_that_does_not_exist_is_named() -> None:
    assert complaint({"a": "${vars.prot}"}) == "a: nothing in this file is called vars.prot"


def test_a_map_cannot_stand_inside_a_text() -> None:
    assert "cannot stand inside another text" in complaint({"m": {"x": 1}, "a": "p${m}"})


def test_every_problem_is_found_at_once() -> None:
    assert len(interpolate({"a": "${A}", "b": ["${B}", "${c.d}"], "e": "${not a name}"}, {}).problems) == 4


@pytest.mark.parametrize(("text", "expected"), [("$$", "$"), ("$${HOME}", "${HOME}"), ("$5", "$5"), ("a$", "a$")])
def test_a_dollar_sign_can_be_written(text: str, expected: str) -> None:
    assert filled({"a": text}, HOME="h") == {"a": expected}
