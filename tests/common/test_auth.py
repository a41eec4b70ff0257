import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.common.auth import check_token, is_loopback, refuse_open_listener
from atoll.common.errors import AtollError, BadConfiguration


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cretx"])
def test_a_wrong_or_missing_token_is_refused(header: str | None) -> None:
    with pytest.raises(AtollError) as refusal:
        check_token(header, "s3cret")
    assert refusal.value.reason == errors_pb2.REASON_UNAUTHENTICATED
    assert "s3cret" not in refusal.value.message


def test_the_right_token_passes_and_no_token_checks_nothing() -> None:
    check_token("bearer s3cret", "s3cret")
    check_token("Bearer s3cret", "s3cret")
    check_token(None, None)


def test_only_loopback_may_be_open() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1") and is_loopback("127.8.8.8")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example", ""):
        assert not is_loopback(host)
        with pytest.raises(BadConfiguration, match="ATOLL_TOKEN"):
            refuse_open_listener(host, None, "ATOLL_X_HOST")
    refuse_open_listener("0.0.0.0", "token", "ATOLL_X_HOST")
