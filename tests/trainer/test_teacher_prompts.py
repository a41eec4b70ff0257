"""Prompts of teachers: the model's own template and tokenizer, and the rows that sdft makes of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.common.renderer import TOKENIZER_FILES, Renderer
from atoll.families.catalog import AnyFamily, make_family
from atoll.families.run_settings import RunSettings
from atoll.families.samples import PromptRenderer
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.job_families import JobFamily
from atoll.trainer.preparation import shape_batch
from atoll.trainer.teacher_prompts import ModelRenderer
from pydantic import JsonValue

from tests.families.reported import reported

QUESTION = {"role": "user", "content": "hi"}


def student(tiny_models: Path) -> Path:
    return tiny_models / "student"


def gateways_renderer(directory: Path) -> Renderer:
    files = {name: directory / name for name in TOKENIZER_FILES}
    return Renderer.from_files({name: path.read_bytes() for name, path in files.items() if path.is_file()})


def test_a_teachers_prompt_is_rendered_as_the_gateway_renders(tiny_models: Path) -> None:
    ids = ModelRenderer.from_directory(student(tiny_models), 200).render([QUESTION])
    assert ids.dtype == "int32"
    assert ids.tolist() == gateways_renderer(student(tiny_models)).render([QUESTION], 200)


def test_parts_and_developers_are_rendered_as_the_gateway_renders_them(tiny_models: Path) -> None:
    renderer = ModelRenderer.from_directory(student(tiny_models), 200)
    parts: JsonValue = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = renderer.render([{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}])
    assert (
        got.tolist()
        == renderer.render([{"role": "system", "content": "brief"}, {"role": "user", "content": "a\nb"}]).tolist()
    )


def own(family: AnyFamily, run: RunSettings, renderer: PromptRenderer | None = None) -> JobFamily:
    return JobFamily(family, FamilyBinding(family.reference(), {}, run), is_own=True, renderer=renderer)


def test_a_prompt_that_does_not_fit_is_refused(tiny_models: Path) -> None:
    with pytest.raises(Exception, match="send less"):
        ModelRenderer.from_directory(student(tiny_models), 3).render([QUESTION])


def test_a_model_without_a_tokenizer_cannot_start_a_family_that_renders(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"the family renders prompts, and the model has no config\.json"):
        ModelRenderer.from_directory(tmp_path, 200)


def test_rows_of_sdft_carry_the_rendered_context(tiny_models: Path) -> None:
    run = RunSettings(vocab_size=1100, seq_length=200)
    family = make_family("sdft", {}).bind(run)
    item = reported("a", metadata={"teacher_context": "say hello"})
    item = replace(item, sample=replace(item.sample, request={"messages": [dict(QUESTION)]}))
    renderer = ModelRenderer.from_directory(student(tiny_models), run.seq_length)
    (row,) = shape_batch("job-1", 1, [item], own(family, run, renderer)).rows
    taught = {"role": "user", "content": "hi\n\nsay hello"}
    assert row.columns["teacher_tokens"].tolist() == [*renderer.render([taught]).tolist(), 3, 4, 5]
    with pytest.raises(BadConfiguration, match="the driver has no chat template"):
        shape_batch("job-1", 1, [item], own(family, run))


def test_heads_reach_the_rows_where_score_centering_is_on() -> None:
    run = RunSettings(vocab_size=1100, seq_length=200, score_centering=True, score_centering_top_k=2)
    family = make_family("opd", {}).bind(run)
    item = reported("a", score=None, top_k=4, log_probs=(-3.0, -3.0, -3.0))
    (row,) = shape_batch("job-1", 1, [item], own(family, run)).rows
    assert row.columns["sampler_topk_ids"].tolist() == [[0, 1], [4, 5], [8, 9]]
    with pytest.raises(InvalidInput, match="sample sample-of-a: score centering: no top-k was recorded"):
        shape_batch("job-1", 1, [reported("a", score=None)], own(family, run))
