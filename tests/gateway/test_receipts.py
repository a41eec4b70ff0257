"""A receipt says whether this deployment handed it out, and for which scenario."""

import re

from atoll.gateway.receipts import Receipts


def test_a_receipt_is_a_resource_id_and_never_the_same_twice() -> None:
    receipts = Receipts(b"key")
    issued = {receipts.issue("math") for _ in range(1000)}
    assert len(issued) == 1000 and all(re.fullmatch(r"[0-9a-f]{32}", receipt) for receipt in issued)


def test_only_the_deployment_and_scenario_that_issued_a_receipt_recognise_it() -> None:
    receipt = Receipts(b"key").issue("math")
    assert Receipts(b"key").was_issued("math", receipt)
    assert not Receipts(b"key").was_issued("chat", receipt)
    assert not Receipts(b"other key").was_issued("math", receipt)


def test_what_was_never_a_receipt_is_not_recognised() -> None:
    receipts = Receipts(b"key")
    receipt = receipts.issue("math")
    for text in ("", "x", receipt[:-1], receipt + "0", receipt.upper() + "é", "0" * 32, "\ud800" * 32):
        assert not receipts.was_issued("math", text), text
