"""Every situation that a job can be in, enumerated; and the run of a job as the sequence of its actions."""

from dataclasses import replace
from itertools import product

from atoll.common.weight_version import WeightVersion
from atoll.trainer.chain import ChainVersion
from atoll.trainer.decision import Action, Situation, next_action

HEAD = ChainVersion(7, 6, WeightVersion(1, 7))
START = Situation(committed=None, head=HEAD, loaded=None, trained_from=None, staged=False, crashes=0)


def test_an_undisturbed_job_loads_trains_stages_commits_and_is_adopted() -> None:
    actions = [next_action(START)]
    loaded = replace(START, loaded=7)
    actions.append(next_action(loaded))
    trained = replace(loaded, loaded=None, trained_from=7)
    actions.append(next_action(trained))
    actions.append(next_action(replace(trained, staged=True)))
    actions.append(next_action(replace(trained, staged=True, committed=HEAD)))
    assert actions == [Action.LOAD_HEAD, Action.TRAIN, Action.STAGE, Action.COMMIT, Action.ADOPT]


def every_situation() -> list[Situation]:
    return [
        Situation(committed, HEAD, loaded, trained_from, staged, crashes)
        for committed, loaded, trained_from, staged, crashes in product(
            (None, HEAD), (None, 6, 7), (None, 6, 7), (False, True), (0, 2, 3)
        )
    ]


def test_a_committed_job_is_never_trained_again() -> None:
    for known in every_situation():
        assert (next_action(known) is Action.ADOPT) == (known.committed is not None)


def test_training_starts_only_from_the_head_untouched() -> None:
    for known in every_situation():
        if next_action(known) is Action.TRAIN:
            assert known.loaded == HEAD.number and known.trained_from is None and known.crashes < 3


def test_nothing_but_steps_from_the_present_head_is_committed() -> None:
    for known in every_situation():
        if next_action(known) is Action.COMMIT:
            assert known.trained_from == HEAD.number and known.staged


def test_after_max_attempts_crashes_a_job_fails_unless_it_is_in_the_chain() -> None:
    for known in every_situation():
        expected = known.crashes >= 3 and known.committed is None
        assert (next_action(known) is Action.FAIL) == expected


def test_steps_from_a_version_that_is_no_longer_the_head_are_discarded() -> None:
    for known in every_situation():
        if known.trained_from == 6 and known.committed is None and known.crashes < 3:
            assert next_action(known) is Action.DISCARD
