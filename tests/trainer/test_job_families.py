"""Jobs of other families than the run started with: what is refused by name, and what such a job leaves behind."""

import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from atoll.api.errors.v1 import errors_pb2
from atoll.api.trainer.v1 import job_pb2, trainer_service_pb2
from atoll.common import structs
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.families.catalog import make_family
from atoll.families.driver import TEACHER_ENGINE
from atoll.families.run_settings import RunSettings
from atoll.families.samples import PromptRenderer
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.job_families import BROUGHT_KEPT, JobFamilies, JobFamily, refuse_other_reports
from atoll.trainer.trained_families import TrainedFamilies, TrainedFamily
from pydantic import JsonValue

from tests.families.reported import reported
from tests.trainer.brought_families import CountingFamily
from tests.trainer.world import OPTIONS, World, pair, until, world

HERE = "tests.trainer.brought_families"
SAO: dict[str, JsonValue] = {"eps_clip_high": 5.0}
RUN = RunSettings(vocab_size=1100, seq_length=200, has_reference=True)


class NoRenderer:
    """Stands for the renderer of the run's model."""

    def render(self, messages: object) -> object:
        raise AssertionError("nothing is rendered here")


def no_renderer() -> PromptRenderer:
    return NoRenderer()  # type: ignore[return-value]


def families(
    own: str = "grpo", options: Mapping[str, JsonValue] = OPTIONS, run: RunSettings = RUN, *driver_options: str
) -> JobFamilies:
    family = make_family(own, options).bind(run)
    binding = FamilyBinding(family.reference(), options, run)
    return JobFamilies(JobFamily(family, binding, is_own=True), no_renderer, driver_options)


def test_the_runs_own_family_is_taken_under_both_its_names() -> None:
    run = families()
    assert run.of("grpo", OPTIONS, {}) is run.own
    assert run.of(run.own.family.reference(), {**OPTIONS, "normalize_std": True}, {}) is run.own
    assert run.of("atoll.families.grpo:GrpoFamily", OPTIONS, {}) is run.own
    with pytest.raises(Conflict, match=r"options is .* this trainer trains .* of grpo"):
        run.of("grpo", {**OPTIONS, "n_samples_per_prompt": 3}, {})


def test_another_family_comes_with_its_options_and_is_made_once() -> None:
    run = families()
    brought = run.of("sft", {"batch_size": 3}, {})
    assert (brought.is_own, brought.family.name, brought.binding.options) == (False, "sft", {"batch_size": 3})
    assert brought.run == RUN
    assert run.of("sft", {"batch_size": 3}, {}) is brought
    assert run.of("sft", {"batch_size": 4}, {}) is not brought


def test_only_so_many_brought_families_are_kept_and_those_that_jobs_still_name_are_among_them() -> None:
    run = families()
    first, second = (run.of("sft", {"batch_size": size}, {}) for size in (1, 2))
    for size in range(3, BROUGHT_KEPT + 2):
        run.of("sft", {"batch_size": size}, {})
        assert run.of("sft", {"batch_size": 1}, {}) is first
    again = run.of("sft", {"batch_size": 2}, {})
    assert again is not second
    assert again.family.options == second.family.options


async def test_a_family_is_looked_up_beside_the_loop_that_renews_the_lease(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, of = [], JobFamilies.of

    def noted(self: JobFamilies, name: str, options: Mapping[str, JsonValue], trained: TrainedFamilies) -> JobFamily:
        looked_up.append(threading.current_thread())
        return of(self, name, options, trained)

    monkeypatch.setattr(JobFamilies, "of", noted)
    stub = await here.start()
    await stub.SubmitJob(job_of(here, 0, "sft", batch_size=2))
    assert (await until(stub, "job-0")).state == job_pb2.JOB_STATE_SERVED
    assert len(looked_up) >= 2, "when it is submitted, and when it is prepared"
    assert threading.current_thread() not in looked_up


def test_a_family_of_another_package_comes_by_reference_and_then_by_name() -> None:
    run = families()
    brought = run.of(f"{HERE}:CountingFamily", {}, {})
    assert type(brought.family) is CountingFamily
    assert run.of("counting", {}, {}) is brought


def test_a_family_of_another_package_is_known_by_name_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from {HERE} import CountingFamily\nclass FreshFamily(CountingFamily):\n    name = 'fresh'\n"
    (tmp_path / "fresh_losses.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotFound, match="no loss family 'fresh'"):
        families().of("fresh", {}, {})
    earlier = {"fresh": TrainedFamily({}, reference="fresh_losses:FreshFamily")}
    assert families().of("fresh", {}, earlier).binding.reference == "fresh_losses:FreshFamily"


def test_a_family_that_renders_prompts_gets_the_models_renderer() -> None:
    assert isinstance(families().of("sdft", {}, {}).renderer, NoRenderer)
    assert families().of("sft", {}, {}).renderer is None


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("sao", SAO, "family", "sao cannot be trained in this run: it configures the critic"),
        ("opd", {}, "family", "opd cannot .* driver options that this trainer was not started with: teacher;"),
        ("sft", {"batch": 1}, "options.batch", "sft has no option batch"),
        ("sao", {}, "options.eps_clip_high", "eps_clip_high: .* it has no default"),
        ("sdft", {"top_k": 5000}, "top_k", "family sdft in a run that started with grpo: .*at most 1100"),
        ("nonesuch", {}, "family", "no loss family 'nonesuch'; known: .*grpo"),
        ("no.such:Family", {}, "family", "there is no module no"),
        (f"{HERE}:NoFamily", {}, "family", "has no NoFamily"),
    ],
)
def test_what_cannot_train_in_the_run_is_refused_by_name(
    name: str, options: Mapping[str, JsonValue], field: str, message: str
) -> None:
    with pytest.raises(AtollError, match=message) as refused:
        families().of(name, options, {})
    assert refused.value.field == field


def test_what_a_run_of_that_family_would_be_refused_is_refused_here_too() -> None:
    stale = replace(RUN, max_staleness=2)
    run = families("grpo", OPTIONS, stale, TEACHER_ENGINE)
    with pytest.raises(InvalidInput, match="importance_sampling_cap 0 is refused with max_staleness 2"):
        run.of("opd", {}, {})
    assert run.of("opd", {"importance_sampling_cap": 2.0}, {}).family.name == "opd"


def test_a_second_distillation_family_is_refused_whichever_came_first() -> None:
    run = families()
    # Both may wait for their turn; whichever trains first has the run.
    sdft, sdpo = run.of("sdft", {}, {}), run.of("sdpo", {}, {})
    with pytest.raises(Conflict, match=r"sdpo cannot .* second distillation family beside sdft"):
        run.of("sdpo", {}, sdft.after({}, {}))
    with pytest.raises(Conflict, match=r"sdft cannot .* second distillation family beside sdpo"):
        run.of("sdft", {}, sdpo.after({}, {}))
    with pytest.raises(Conflict, match="second distillation family beside sdft"):
        families("sdft", {}).of("sdpo", {}, {})
    assert families("sdft", {}).of("sft", {}, {})


def test_a_distillation_family_of_an_earlier_process_is_known_from_the_checkpoint() -> None:
    trained = families().of("sdft", {}, {}).after({}, {})
    with pytest.raises(Conflict, match="second distillation family beside sdft"):
        families().of("sdpo", {}, trained)
    assert families().of("sdft", {}, trained).family.name == "sdft"


def test_a_wire_key_of_another_element_type_is_refused() -> None:
    with pytest.raises(Conflict, match="wire key action_mask as float32, sao of this run as uint8"):
        families("sao", SAO).of(f"{HERE}:ClashingFamily", {}, {})
    earlier = {"theirs": TrainedFamily({}, {"action_mask": "int32"})}
    with pytest.raises(Conflict, match="wire key action_mask as float32, theirs of this run as int32"):
        families().of(f"{HERE}:ClashingFamily", {}, earlier)
    assert families().of(f"{HERE}:ClashingFamily", {}, {})


def test_states_of_families_are_kept_apart() -> None:
    run = families()
    counting, sft = run.of(f"{HERE}:CountingFamily", {}, {}), run.of("sft", {}, {})
    trained = sft.after({"b": 2}, counting.after({"a": 1}, {}))
    assert (counting.state(trained), sft.state(trained), run.own.state(trained)) == ({"a": 1}, {"b": 2}, {})


def test_reports_that_another_family_cannot_read_are_refused_by_sample() -> None:
    family = make_family("sdft", {"batch_size": 2})
    items = [reported("a", metadata={"teacher_context": "say so"}), reported("b")]
    with pytest.raises(InvalidInput, match=r"sample-of-b: its report does not fit sdft: .*teacher_context") as no:
        refuse_other_reports(family, items)
    assert no.value.sample_ids == ("sample-of-b",)


@pytest.mark.parametrize(("size", "fits"), [(1, False), (2, True), (3, False)])
def test_reports_that_are_not_one_batch_of_another_family_are_refused(size: int, fits: bool) -> None:
    items = [reported("a"), reported("b")]
    family = make_family("sft", {"batch_size": size})
    if fits:
        refuse_other_reports(family, items)
        return
    with pytest.raises(InvalidInput, match="2 reports are not one batch of sft"):
        refuse_other_reports(family, items)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


def job_of(here: World, number: int, family: str, **options: JsonValue) -> trainer_service_pb2.SubmitJobRequest:
    submission = here.job(f"job-{number}", pair(f"s{number}", versions=(f"1:{number}",)))
    submission.family = family
    submission.options.CopyFrom(structs.struct_from(options))
    return submission


async def test_a_run_takes_jobs_of_other_families_and_goes_back_with_every_state_in_the_checkpoint(
    here: World,
) -> None:
    jobs: list[tuple[str, dict[str, JsonValue]]] = [
        ("grpo", OPTIONS),
        ("sft", {"batch_size": 2}),
        (f"{HERE}:CountingFamily", {}),
        ("grpo", OPTIONS),
    ]
    for number, (family, options) in enumerate([*jobs, ("counting", {})]):
        # A fresh process each time: what the families remember is in the checkpoint alone.
        stub = await here.start()
        if family == "counting":
            family = f"{HERE}:CountingFamily"
        await stub.SubmitJob(job_of(here, number, family, **options))
        job = await until(stub, f"job-{number}")
        assert (job.state, job.version) == (job_pb2.JOB_STATE_SERVED, number + 1), job.message
        assert (await here.registry.versions())[number + 1].family == family
        reference = make_family(family, options).reference()
        assert here.backend.trained_families == [reference]
        assert here.backend.checked_families == ([] if family == "grpo" else [reference])
    assert (await here.registry.versions())[3].metrics["counting/jobs"] == 0
    assert (await here.registry.versions())[5].metrics["counting/jobs"] == 1


async def test_a_family_that_the_workers_cannot_run_ends_its_job_and_no_other(here: World) -> None:
    stub = await here.start()

    def refuse() -> None:
        raise InvalidInput("loss family sft: no objective", field="family")

    here.backend.before["check_family"] = [refuse]
    await stub.SubmitJob(job_of(here, 0, "sft", batch_size=2))
    job = await until(stub, "job-0")
    assert (job.state, job.message) == (job_pb2.JOB_STATE_REFUSED, "loss family sft: no objective")
    await stub.SubmitJob(here.job("job-1", pair("b")))
    assert (await until(stub, "job-1")).state == job_pb2.JOB_STATE_SERVED
    assert len(here.backend.loads) == 1


async def test_a_family_that_kills_the_workers_when_they_resolve_it_fails_after_as_many_times_as_a_step_would(
    here: World,
) -> None:
    stub = await here.start()
    here.backend.before["check_family"] = [here.backend.crash] * 1_000
    await stub.SubmitJob(job_of(here, 0, "sft", batch_size=2))
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_FAILED, errors_pb2.REASON_TRAINING_CRASHED)
    assert "crashed in 3 attempts" in job.message
    await stub.SubmitJob(here.job("job-1", pair("b")))
    assert (await until(stub, "job-1")).version == 1


async def test_a_defect_while_a_job_is_prepared_is_blamed_on_no_sample(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(job_of(here, 0, f"{HERE}:BrokenFamily"))
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_FAILED, errors_pb2.REASON_INTERNAL)
    assert ("no answer for sample s0-0" in job.message, list(job.rejected_sample_ids)) == (True, [])


async def test_rows_that_do_not_fit_the_jobs_family_are_refused(here: World) -> None:
    stub = await here.start()
    await stub.SubmitJob(job_of(here, 0, "sft", batch_size=3))
    job = await until(stub, "job-0")
    assert (job.state, job.reason) == (job_pb2.JOB_STATE_REFUSED, errors_pb2.REASON_BATCH_REFUSED)
    assert "2 reports are not one batch of sft" in job.message
