import pytest
from atoll.common.errors import BadConfiguration
from atoll.common.settings import ServiceSettings, load_settings
from pydantic_settings import SettingsConfigDict


class ExampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ATOLL_EXAMPLE_", frozen=True, extra="forbid")
    port: int
    engines: tuple[str, ...] = ()
    rate: float = 1.0


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_EXAMPLE_PORT", "7000")
    monkeypatch.setenv("ATOLL_EXAMPLE_ENGINES", '["http://a", "http://b"]')
    monkeypatch.setenv("ATOLL_TOKEN", "s3cret")
    settings = load_settings(ExampleSettings)
    assert (settings.port, settings.engines, settings.token_text) == (7000, ("http://a", "http://b"), "s3cret")
    assert "s3cret" not in repr(settings)


def test_every_problem_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_EXAMPLE_PORT", "many")
    monkeypatch.setenv("ATOLL_EXAMPLE_PROT", "7000")
    monkeypatch.setenv("ATOLL_EXAMPLE_TOKEN", "ATOLL_TOKEN is meant")
    with pytest.raises(BadConfiguration) as refusal:
        load_settings(ExampleSettings)
    assert "ATOLL_EXAMPLE_PROT: no such setting" in refusal.value.message
    assert "ATOLL_EXAMPLE_TOKEN: no such setting" in refusal.value.message
    assert "ATOLL_EXAMPLE_PORT" in refusal.value.message


def test_a_missing_value_and_an_empty_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    with pytest.raises(BadConfiguration, match="ATOLL_EXAMPLE_PORT: Field required"):
        load_settings(ExampleSettings)
    monkeypatch.setenv("ATOLL_EXAMPLE_PORT", "1")
    for nothing in ("", " "):
        monkeypatch.setenv("ATOLL_TOKEN", nothing)
        with pytest.raises(BadConfiguration, match="ATOLL_TOKEN: is empty"):
            load_settings(ExampleSettings)


def test_a_list_that_is_not_json_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_EXAMPLE_PORT", "1")
    monkeypatch.setenv("ATOLL_EXAMPLE_ENGINES", "http://a,http://b")
    with pytest.raises(BadConfiguration, match=r"ATOLL_EXAMPLE_ENGINES: is not JSON.*Expecting value"):
        load_settings(ExampleSettings)


@pytest.mark.parametrize("value", ["inf", "-inf", "1e400", "nan"])
def test_a_number_that_is_not_finite_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ATOLL_EXAMPLE_PORT", "1")
    monkeypatch.setenv("ATOLL_EXAMPLE_RATE", value)
    with pytest.raises(BadConfiguration, match="ATOLL_EXAMPLE_RATE: Input should be a finite number"):
        load_settings(ExampleSettings)
