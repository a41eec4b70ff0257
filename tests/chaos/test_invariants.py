"""The checks of the chaos run find what they are for: every one of them is broken once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.client import AcknowledgedChat, AcknowledgedReport, Ledger
from tests.chaos.databases import Claim, GatewayState, RegistryState, StoredJob, StoredSample, StoredVersion
from tests.chaos.invariants import Findings, check
from tests.fakes.weight_engine import token_of, weights_key

FILES = {"m0": [("model.safetensors", "00" * 32)], "m1": [("model.safetensors", "11" * 32)]}
PROMPT = (5, 6)


def sampled(receipt: str, version: str = "1:0", digest: str = "m0") -> StoredSample:
    tokens = tuple(token_of(weights_key(FILES[digest]), list(PROMPT), at) for at in range(3))
    return StoredSample(receipt, "text", PROMPT, tokens, ((0, 3, version),))


def chat(receipt: str, **changes: Any) -> AcknowledgedChat:
    return replace(AcknowledgedChat(receipt, "text", "1:0", None, at=1000.0), **changes)


def healthy() -> tuple[GatewayState, RegistryState, Ledger]:
    """Sample a is consumed by version 1, b is reserved, c settled, d pending with a report, e pending without one."""
    gateway = GatewayState(
        samples={receipt: sampled(receipt) for receipt in "abcde"},
        claims={
            "a": Claim("consumed", "job-1", ""),
            "b": Claim("reserved", "job-2", ""),
            "c": Claim("settled", "job-3", "stale_sample"),
        },
        reports={"a": ("ra", "job-1"), "b": ("rb", "job-2"), "c": ("rc", "job-3"), "d": ("rd", None)},
        batches={"job-1": "committed", "job-2": "open", "job-3": "dropped"},
        batch_receipts={"job-1": ["a"], "job-2": ["b"], "job-3": ["c"]},
    )
    versions = [
        StoredVersion(0, None, "creation", 1, None, "m0", None, 10.0),
        StoredVersion(1, 0, "training", 1, "job-1", "m1", "c1", 20.0, ("a",), fencing_token=1),
    ]
    jobs = {"job-1": StoredJob("committed", 1, None, 1), "job-2": StoredJob("running", 1, None, None)}
    registry = RegistryState(1, versions, FILES, frozenset(), jobs)
    ledger = Ledger(
        chats={receipt: chat(receipt) for receipt in "abcde"},
        reports={receipt: AcknowledgedReport(receipt, "q" + receipt, "r" + receipt) for receipt in "abcd"},
    )
    return gateway, registry, ledger


def test_a_healthy_state_has_no_findings() -> None:
    assert not check(*healthy()).any


def broken(change: Callable[[GatewayState, RegistryState, Ledger], tuple[GatewayState, RegistryState]]) -> Findings:
    gateway, registry, ledger = healthy()
    return check(*change(gateway, registry, ledger), ledger)


def with_claim(receipt: str, claim: Claim | None) -> Findings:
    def change(gateway: GatewayState, registry: RegistryState, _: Ledger) -> tuple[GatewayState, RegistryState]:
        claims = {**gateway.claims, receipt: claim}
        kept = {name: value for name, value in claims.items() if value is not None}
        return replace(gateway, claims=kept), registry

    return broken(change)


def with_version(**changes: Any) -> Findings:
    """The newest version is another one."""
    return broken(lambda g, r, _: (g, replace(r, versions=[r.versions[0], replace(r.versions[1], **changes)])))


def with_sample(sample: StoredSample) -> Findings:
    return broken(lambda g, r, _: (replace(g, samples={**g.samples, sample.receipt: sample}), r))


@pytest.mark.parametrize(
    ("receipt", "claim"),
    [
        ("a", Claim("consumed", "job-9", "")),
        ("b", Claim("reserved", "job-3", "")),
        ("b", Claim("reserved", "job-9", "")),
        ("b", None),
        ("b", Claim("consumed", "job-2", "")),
        ("c", Claim("settled", "job-3", "")),
        ("d", Claim("elsewhere", "", "")),
    ],
)
def test_a_receipt_in_no_true_state_is_lost(receipt: str, claim: Claim | None) -> None:
    assert with_claim(receipt, claim).lost


def test_what_was_answered_and_is_gone_is_lost() -> None:
    without_sample = broken(lambda g, r, _: (replace(g, samples={k: v for k, v in g.samples.items() if k != "e"}), r))
    assert without_sample.lost == ["sample e of an answered chat"]
    without_report = broken(lambda g, r, _: (replace(g, reports={k: v for k, v in g.reports.items() if k != "d"}), r))
    assert without_report.lost == ["report rd on d"]


@pytest.mark.parametrize("claim", [None, Claim("settled", "job-1", "stale_sample")])
def test_a_trained_sample_that_is_free_or_given_up_counts_as_twice(claim: Claim | None) -> None:
    assert with_claim("a", claim).twice


def test_a_sample_in_two_batches_and_a_report_with_another_id_count_as_twice() -> None:
    assert broken(lambda g, r, _: (replace(g, batch_receipts={**g.batch_receipts, "job-2": ["b", "a"]}), r)).twice
    assert broken(lambda g, r, _: (replace(g, reports={**g.reports, "d": ("other", None)}), r)).twice
    assert broken(lambda g, r, _: (replace(g, batches={**g.batches, "job-1": "dropped"}), r)).twice


def test_gaps_forks_and_deposed_holders_are_found_in_the_chain() -> None:
    assert with_version(number=2).lost
    assert with_version(parent=None).twice
    assert with_version(incarnation=2).wrong_version
    assert with_version(consumed=("b",)).lost
    tail = StoredVersion(2, 1, "training", 1, "job-2", "m1", "c2", 30.0, ("b",), fencing_token=0)
    assert broken(lambda g, r, _: (g, replace(r, head=2, versions=[*r.versions, tail]))).twice
    again = replace(tail, fencing_token=1, job_id="job-1", consumed=("a",))
    assert broken(lambda g, r, _: (g, replace(r, head=2, versions=[*r.versions, again]))).twice


def test_a_job_record_that_disagrees_with_the_chain_is_found() -> None:
    for record in (StoredJob("running", 1, None, None), StoredJob("committed", 1, None, 2)):
        changed = record
        assert broken(lambda g, r, _: (g, replace(r, jobs={**r.jobs, "job-1": changed}))).lost  # noqa: B023


def test_a_version_that_restores_another_has_its_bytes() -> None:
    assert with_version(operation="rollback", incarnation=2, restores=0, checkpoint_digest=None).wrong_version
    assert not with_version(
        operation="rollback", incarnation=2, restores=0, checkpoint_digest=None, model_digest="m0"
    ).wrong_version


def test_tokens_of_other_weights_than_recorded_are_a_wrong_version() -> None:
    assert with_sample(sampled("e", "1:0", "m1")).wrong_version
    assert with_sample(sampled("e", "1:7")).wrong_version
    assert with_sample(replace(sampled("e"), spans=((0, 2, "1:0"),))).wrong_version
    assert with_sample(replace(sampled("e"), text="other")).wrong_version


def test_an_answer_of_another_version_than_told_or_asked_for_is_a_wrong_version() -> None:
    for changes in ({"weight_version": "1:1"}, {"pinned": 1}, {"at": 5.0}):
        gateway, registry, ledger = healthy()
        ledger.chats["e"] = chat("e", **changes)
        assert check(gateway, registry, ledger).wrong_version, changes
