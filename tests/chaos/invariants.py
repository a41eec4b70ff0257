"""What must hold after any kill, checked on what is on disk and on what the engines answer, never on logs."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.client import Ledger
from tests.chaos.databases import Claim, GatewayState, RegistryState, StoredSample
from tests.fakes.fake_engine import END_TOKEN
from tests.fakes.weight_engine import token_of

NEW_INCARNATION = frozenset({"rollback", "recovery"})
CLOCK_SECONDS = 0.5
"""Between a commit's time and the end of a reply that it sampled: both are of this machine's clock."""


@dataclass
class Findings:
    """What was broken; all empty is what is wanted."""

    lost: list[str] = field(default_factory=list)
    """Receipts in no state, acknowledged things that are gone, versions that are missing or have no bytes."""
    twice: list[str] = field(default_factory=list)
    """Samples and jobs that two versions or two batches have, or that could be trained again."""
    stuck: list[str] = field(default_factory=list)
    """What did not end although everything runs."""
    wrong_version: list[str] = field(default_factory=list)
    """Tokens that the recorded version did not sample, and engines that serve another one than they say."""

    def add(self, other: "Findings") -> None:
        for name, found in vars(other).items():
            getattr(self, name).extend(item for item in found if item not in getattr(self, name))

    @property
    def any(self) -> bool:
        return bool(self.lost or self.twice or self.stuck or self.wrong_version)

    def counts(self) -> str:
        """Example: "lost=0 twice=0 stuck=0 wrong_version=0" """
        return " ".join(f"{name}={len(found)}" for name, found in vars(self).items())

    def lines(self) -> Iterable[str]:
        return [f"{name}: {item}" for name, found in vars(self).items() for item in found]


def check(gateway: GatewayState, registry: RegistryState, ledger: Ledger, *, arithmetic: bool = True) -> Findings:
    """Everything that holds at any moment, when the registry was read after the gateway.

    arithmetic: the fake engine sampled, so tokens can be computed.
    """
    found = Findings()
    _check_chain(registry, found)
    _check_promises(gateway, ledger, found)
    _check_states(gateway, registry, found)
    _check_consumption(gateway, registry, found)
    for sample in gateway.samples.values():
        _check_sample(sample, registry, ledger, found, arithmetic)
    return found


def check_head_bytes(registry: RegistryState, store: Path) -> list[str]:
    """Why the head cannot be served, from its files; nothing when it can."""
    digest = registry.versions[-1].model_digest
    if digest in registry.removed:
        return [f"the head {registry.head} has no bytes: {digest} was removed"]
    problems = []
    for path, sha256 in registry.files[digest]:
        file = store / "artifacts" / digest / "files" / path
        if not file.exists():
            problems.append(f"the head {registry.head} lacks {path}")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            problems.append(f"{path} of the head {registry.head} is damaged")
    return problems


def _check_chain(registry: RegistryState, found: Findings) -> None:
    versions = registry.versions
    numbers = [version.number for version in versions]
    if numbers != list(range(len(versions))) or registry.head != len(versions) - 1:
        found.lost.append(f"the chain has gaps: versions {numbers}, head {registry.head}")
        return
    if [version.parent for version in versions] != [None, *numbers[:-1]]:
        found.twice.append(f"the chain has a fork: parents {[version.parent for version in versions]}")
    incarnation = 1
    for version in versions:
        incarnation += version.operation in NEW_INCARNATION
        if version.incarnation != incarnation:
            found.wrong_version.append(f"version {version.number} is of incarnation {version.incarnation}")
    for version in versions:
        if version.restores is None:
            continue
        source = versions[version.restores]
        if source.checkpoint_digest != version.checkpoint_digest or (
            version.operation == "rollback" and source.model_digest != version.model_digest
        ):
            found.wrong_version.append(f"version {version.number} restores {source.number} and has other bytes")
    jobs = Counter(version.job_id for version in versions if version.job_id)
    found.twice.extend(f"job {job} made {count} versions" for job, count in jobs.items() if count > 1)
    tokens = [version.fencing_token for version in versions[1:]]
    if tokens != sorted(tokens):
        found.twice.append(f"a deposed holder committed: fencing tokens {tokens}")


def _check_promises(gateway: GatewayState, ledger: Ledger, found: Findings) -> None:
    """What a client was told is there."""
    for receipt, chat in ledger.chats.items():
        sample = gateway.samples.get(receipt)
        if sample is None:
            found.lost.append(f"sample {receipt} of an answered chat")
            continue
        if sample.text != chat.text:
            found.wrong_version.append(f"sample {receipt} is recorded as {sample.text!r}, answered was {chat.text!r}")
        if not sample.spans or sample.spans[-1][2] != chat.weight_version:
            found.wrong_version.append(f"sample {receipt} has {sample.spans}, told was {chat.weight_version}")
        numbers = {int(version.split(":")[1]) for _, _, version in sample.spans}
        if chat.pinned is not None and numbers != {chat.pinned}:
            found.wrong_version.append(f"chat {receipt} asked for version {chat.pinned}, {sample.spans} answered")
    for receipt, report in ledger.reports.items():
        stored = gateway.reports.get(receipt)
        if stored is None:
            found.lost.append(f"report {report.report_id} on {receipt}")
        elif stored[0] != report.report_id:
            found.twice.append(f"receipt {receipt} has report {stored[0]}, the client was told {report.report_id}")


def _check_states(gateway: GatewayState, registry: RegistryState, found: Findings) -> None:
    """Every sample is pending, reserved, consumed, or settled with a reason, and its report agrees."""
    consumed_by = {receipt: version for version in registry.versions for receipt in version.consumed}
    for receipt in gateway.samples:
        claim = gateway.claims.get(receipt)
        version = consumed_by.get(receipt)
        problem = _state_problem(gateway, receipt, claim, None if version is None else version.job_id)
        if problem:
            found.lost.append(f"receipt {receipt}: {problem}")
        if version is not None and (claim is None or claim.state == "settled"):
            state = "pending" if claim is None else "settled"
            found.twice.append(f"receipt {receipt} is {state}, and version {version.number} consumed it")


def _state_problem(gateway: GatewayState, receipt: str, claim: Claim | None, consumed_by: str | None) -> str:
    report_job = gateway.reports[receipt][1] if receipt in gateway.reports else None
    if claim is None:
        return f"no state, its report belongs to job {report_job!r}" if report_job is not None else ""
    match claim.state:
        case "reserved":
            held = gateway.batches.get(claim.job_id) == "open" and receipt in gateway.batch_receipts[claim.job_id]
            return "" if held else f"reserved for {claim.job_id}, which is {gateway.batches.get(claim.job_id)}"
        case "consumed":
            return "" if consumed_by == claim.job_id else f"consumed by {claim.job_id}, the chain says {consumed_by}"
        case "settled":
            return "" if claim.reason else "settled without a reason"
    return f"in the unknown state {claim.state!r}"


def _check_consumption(gateway: GatewayState, registry: RegistryState, found: Findings) -> None:
    held = Counter(
        receipt
        for job_id, receipts in gateway.batch_receipts.items()
        if gateway.batches[job_id] in ("open", "committed")
        for receipt in receipts
    )
    found.twice.extend(f"receipt {receipt} is in {count} batches" for receipt, count in held.items() if count > 1)
    consumed = Counter(receipt for version in registry.versions for receipt in version.consumed)
    found.twice.extend(
        f"receipt {receipt} trained {count} versions" for receipt, count in consumed.items() if count > 1
    )
    for version in registry.versions:
        if version.operation == "training" and list(version.consumed) != gateway.batch_receipts.get(
            version.job_id or ""
        ):
            found.lost.append(f"version {version.number} consumed other samples than {version.job_id} had")
    made = {version.job_id: version.number for version in registry.versions}
    for job_id, job in registry.jobs.items():
        if (job.phase == "committed") != (job_id in made) or job.version != made.get(job_id):
            found.lost.append(f"job {job_id} is {job.phase} with version {job.version}, made was {made.get(job_id)}")
    for job_id, state in gateway.batches.items():
        if state == "committed" and job_id not in made:
            found.lost.append(f"the version of {job_id}, whose batch is committed")
        elif state not in ("committed", "open") and job_id in made:
            found.twice.append(f"batch {job_id} is {state}, and the chain has its version")


def _check_sample(
    sample: StoredSample, registry: RegistryState, ledger: Ledger, found: Findings, arithmetic: bool
) -> None:
    position = 0
    for start, end, name in sample.spans:
        version = registry.by_weight_version.get(name)
        if version is None:
            found.wrong_version.append(f"sample {sample.receipt} is of {name}, which never was")
            return
        chat = ledger.chats.get(sample.receipt)
        if chat is not None and version.created_at > chat.at + CLOCK_SECONDS:
            found.wrong_version.append(f"sample {sample.receipt} is older than its version {name}")
        if start != position or end < start:
            found.wrong_version.append(f"sample {sample.receipt} has spans {sample.spans}")
        position = end
        if arithmetic:
            tokens = sample.response[start:end]
            key = registry.key_of(version)
            expected = [token_of(key, list(sample.prompt), at) for at in range(start, end)]
            if end == len(sample.response) and tokens and tokens[-1] == END_TOKEN:
                expected[-1] = END_TOKEN
            wrong = [token for token, right in zip(tokens, expected, strict=True) if token != right]
            if wrong:
                found.wrong_version.append(f"sample {sample.receipt} says {name}, others sampled {wrong}")
    if position != len(sample.response):
        found.wrong_version.append(f"sample {sample.receipt}: {sample.spans} cover {position} tokens")
