from dataclasses import replace
from itertools import accumulate

from atoll.api.errors.v1 import errors_pb2
from atoll.common.errors import AtollError
from atoll.registry.app import Registry
from atoll.registry.job_types import JobPhase
from atoll.registry.types import Operation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.registry.material import SCENARIO, content, seal
from tests.registry.test_restoring import restoring


class ChainMachine(RuleBasedStateMachine):
    """Random commits, rollbacks, replays and refusals against a model that is a list."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self.registry = registry
        self.scenario = f"s{len(self.registry.scenarios.list_page(1000, None))}"
        definition = self.registry.scenarios.get(SCENARIO).definition
        self.registry.scenarios.create(replace(definition, scenario_id=self.scenario))
        self.models = [seal(self.registry, bytes([i])).digest for i in range(2)]
        self.committed = [self.registry.chain.get(self.scenario)]

    @rule(
        parent_offset=st.integers(-2, 1),
        job=st.integers(0, 6),
        model=st.integers(0, 1),
        samples=st.lists(st.integers(0, 12), unique=True, max_size=3),
    )
    def commit(self, parent_offset: int, job: int, model: int, samples: list[int]) -> None:
        head = len(self.committed) - 1
        wanted = content(
            max(0, head + parent_offset),
            self.models[model],
            scenario=self.scenario,
            job_id=f"job-{job}",
            consumed_sample_ids=tuple(f"s-{sample}" for sample in samples),
        )
        before = {version.content.job_id: version for version in self.committed}
        consumed = {sample for version in self.committed for sample in version.content.consumed_sample_ids}
        known = before.get(wanted.job_id)
        try:
            version = self.registry.chain.commit(wanted)
        except AtollError as error:
            allowed = {
                errors_pb2.REASON_JOB_COMMITTED_DIFFERENTLY: known is not None and known.content != wanted,
                errors_pb2.REASON_PARENT_NOT_HEAD: known is None and wanted.parent != head,
                errors_pb2.REASON_SAMPLE_ALREADY_CONSUMED: known is None
                and bool(consumed & set(wanted.consumed_sample_ids)),
            }
            assert allowed[error.reason]
        else:
            if known is not None:
                assert version == known
            else:
                assert (wanted.parent, version.number) == (head, head + 1)
                assert not consumed & set(wanted.consumed_sample_ids)
                self.committed.append(version)

    @rule(number=st.integers(0, 8))
    def roll_back(self, number: int) -> None:
        head = self.committed[-1]
        chosen = self.committed[min(number, head.number)]
        wanted = restoring(
            Operation.ROLLBACK, head, chosen, scenario=self.scenario, job_id=f"back-{head.number}-{chosen.number}"
        )
        try:
            version = self.registry.chain.commit(wanted)
        except AtollError as error:
            assert error.reason == errors_pb2.REASON_NOT_RESTORABLE
            assert not chosen.content.is_durable
        else:
            assert chosen.content.is_durable
            assert version.content.model_digest == chosen.content.model_digest
            self.committed.append(version)

    @invariant()
    def the_chain_is_what_was_answered(self) -> None:
        stored = self.registry.chain.since(self.scenario, 0, 1000)
        assert list(stored) == self.committed
        assert [version.number for version in stored] == list(range(len(stored)))
        assert [version.revision for version in stored] == list(range(1, len(stored) + 1))
        assert self.registry.scenarios.get(self.scenario).head == len(stored) - 1
        begun = [version.content.operation is Operation.ROLLBACK for version in stored]
        assert [version.weight_version.incarnation for version in stored] == [1 + n for n in accumulate(begun)]
        assert len({version.weight_version for version in stored}) == len(stored)
        for version in stored[1:]:
            record = self.registry.job_records.get(self.scenario, version.content.job_id or "")
            assert (record.progress.phase, record.version) == (JobPhase.COMMITTED, version.number)


def test_any_sequence_of_commits_keeps_the_chain_sound(registry: Registry) -> None:
    class OnThisRegistry(ChainMachine):
        def __init__(self) -> None:
            super().__init__(registry)

    run_state_machine_as_test(OnThisRegistry, settings=settings(max_examples=12, stateful_step_count=12, deadline=None))
