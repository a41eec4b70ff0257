import pytest
from atoll.common.errors import InvalidInput
from atoll.common.pages import decode_number_token, decode_page_token, encode_page_token, page_size


def test_sizes_are_bounded() -> None:
    assert (page_size(0), page_size(7), page_size(10**6)) == (100, 7, 1000)
    with pytest.raises(InvalidInput):
        page_size(-1)


def test_tokens_read_back_and_foreign_ones_are_refused() -> None:
    assert decode_page_token("") is None
    assert decode_page_token(encode_page_token("key/é")) == "key/é"
    for bad in ("x", "€", "_w=="):
        with pytest.raises(InvalidInput):
            decode_page_token(bad)


def test_tokens_of_numbers_are_refused_when_they_are_none_or_have_more_than_64_bits() -> None:
    assert decode_number_token("") is None
    assert decode_number_token(encode_page_token("17")) == 17
    for key in ("-1", "x", "1.5", "9" * 19, "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(InvalidInput):
            decode_number_token(encode_page_token(key))
