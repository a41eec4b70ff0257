"""Every situation that a job can be in, enumerated; and the run of a job as the sequence of its actions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from atoll.api.registry.v1 import job_record_pb2
from atoll.api.registry.v1.job_record_pb2 import JobPhase
from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.decision import Action, Memory, Situation, crashes, decide
from atoll.trainer.job_queue import JobBody
from atoll.trainer.job_records import OPEN, RecordedJob, StagedVersion

RECORDED, RUNNING, STAGED, COMMITTED, DROPPED, REFUSED, FAILED, CANCELLED = (
    job_record_pb2.JOB_PHASE_RECORDED,
    job_record_pb2.JOB_PHASE_RUNNING,
    job_record_pb2.JOB_PHASE_STAGED,
    job_record_pb2.JOB_PHASE_COMMITTED,
    job_record_pb2.JOB_PHASE_DROPPED,
    job_record_pb2.JOB_PHASE_REFUSED,
    job_record_pb2.JOB_PHASE_FAILED,
    job_record_pb2.JOB_PHASE_CANCELLED,
)
HEAD = ChainVersion(7, 6, WeightVersion(1, 7))
LIVE = replace(HEAD, durable=False)
BODY = JobBody("job-1", "chat", "grpo", {}, ("a",))
ROLLBACK = JobBody.rollback("back", "chat", 3)


def recorded(phase: JobPhase.ValueType, attempt: int = 0, parent: int = 7, body: JobBody = BODY) -> RecordedJob:
    staged = StagedVersion(parent, "m", "c", {}, {}) if phase == STAGED else None
    return RecordedJob(body, phase, attempt, staged)


def test_an_undisturbed_job_loads_trains_stages_commits_and_is_adopted() -> None:
    untouched, trained = Memory(loaded=7), Memory(begun=1, trained_from=7)
    story = [
        (recorded(RECORDED), Memory()),
        (recorded(RECORDED), untouched),
        (recorded(RUNNING, 1), trained),
        (recorded(STAGED, 1), trained),
        (recorded(COMMITTED, 1), trained),
    ]
    actions = [decide(Situation(record, HEAD, memory)) for record, memory in story]
    assert actions == [Action.LOAD_HEAD, Action.TRAIN, Action.STAGE, Action.COMMIT, Action.ADOPT]


@pytest.mark.parametrize(
    ("record", "action"),
    [
        (recorded(RECORDED), Action.LOAD_HEAD),
        (recorded(RUNNING, 1), Action.LOAD_HEAD),
        (recorded(RUNNING, 3), Action.FAIL),
        (recorded(STAGED, 1), Action.COMMIT),
        (recorded(STAGED, 1, parent=6), Action.LOAD_HEAD),
        (recorded(STAGED, 3, parent=6), Action.LOAD_HEAD),
        (recorded(COMMITTED, 1), Action.ADOPT),
        (recorded(DROPPED), Action.END),
        (recorded(RECORDED, body=ROLLBACK), Action.ROLL_BACK),
    ],
)
def test_a_restarted_trainer_goes_on_from_the_record(record: RecordedJob, action: Action) -> None:
    assert decide(Situation(record, HEAD, Memory())) is action


def test_a_live_head_whose_memory_is_gone_is_recovered_and_one_in_memory_is_gone_on_from() -> None:
    assert decide(Situation(recorded(RECORDED), LIVE, Memory())) is Action.RECOVER
    assert decide(Situation(recorded(RECORDED), LIVE, Memory(loaded=7))) is Action.TRAIN


def every_situation() -> Iterator[Situation]:
    phases = (RECORDED, RUNNING, STAGED, COMMITTED, DROPPED, REFUSED, FAILED, CANCELLED)
    memories = [
        Memory(loaded, begun, trained_from, *flags)
        for loaded, begun, trained_from in product((None, 6, 7), (0, 2), (None, 6, 7))
        for flags in product((False, True), repeat=3)
    ]
    for phase, attempt, parent, body in product(phases, (0, 1, 2, 3), (6, 7), (BODY, ROLLBACK)):
        for head, memory, is_holder in product((HEAD, LIVE), memories, (False, True)):
            yield Situation(recorded(phase, attempt, parent, body), head, memory, is_holder)


def test_without_the_lease_nothing_is_done() -> None:
    for known in every_situation():
        assert (decide(known) is Action.WAIT) == (not known.is_holder)


def test_a_job_that_has_ended_never_runs_again() -> None:
    for known in every_situation():
        if known.is_holder and known.record.phase not in OPEN:
            assert decide(known) is (Action.ADOPT if known.record.phase == COMMITTED else Action.END)


def test_training_starts_only_from_the_head_untouched_and_never_after_max_attempts_crashes() -> None:
    for known in every_situation():
        if decide(known) is Action.TRAIN:
            assert known.memory.loaded == known.head.number and known.memory.trained_from is None
            assert crashes(known.record, known.memory.begun) < 3
            assert known.record.body.restores is None


def test_nothing_but_steps_from_the_present_head_is_committed() -> None:
    for known in every_situation():
        if decide(known) is Action.COMMIT:
            assert known.record.staged is not None and known.record.staged.parent == known.head.number


def test_weights_in_memory_of_another_head_are_never_staged() -> None:
    for known in every_situation():
        if decide(known) is Action.STAGE:
            assert known.memory.trained_from == known.head.number


def test_what_is_found_of_a_full_store_or_an_end_is_told_before_anything_else_is_begun() -> None:
    for known in every_situation():
        if known.is_holder and known.record.phase in OPEN and (known.memory.ends or known.memory.no_room):
            assert decide(known) is (Action.CONCLUDE if known.memory.ends else Action.DEFER)


@pytest.mark.parametrize(
    ("phase", "attempt", "begun", "died"),
    [
        (RECORDED, 0, 0, 0),
        (RECORDED, 2, 0, 2),  # two crashes, and an attempt that was given back
        (RUNNING, 1, 1, 0),  # it runs here
        (RUNNING, 1, 0, 1),  # it ran in a process that is gone
        (RUNNING, 2, 1, 2),  # another holder ran it after us
        (STAGED, 2, 0, 1),
        (STAGED, 0, 0, 0),
    ],
)
def test_only_attempts_that_died_count_as_crashes(
    phase: JobPhase.ValueType, attempt: int, begun: int, died: int
) -> None:
    assert crashes(recorded(phase, attempt), begun) == died
