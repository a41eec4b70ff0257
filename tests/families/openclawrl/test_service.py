"""Hints that the teacher service scored teach what the frozen base of the same weights teaches."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from atoll.common.errors import BadConfiguration, InvalidInput
from atoll.families.catalog import make_family
from atoll.families.driver import TEACHER_ENGINE, JobContext, ScoreRequest, TeacherScores
from atoll.families.openclawrl.service import SERVICE_IDS
from atoll.families.openclawrl.spec import (
    HINT_LENGTHS,
    HINT_OVERLAP,
    HINT_TOKENS,
    SAMPLER_IDS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
)
from atoll.families.rows import Batch, Column, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import RowWeights, TrainRow
from pydantic import JsonValue

from tests.fakes.tiny_actor import TinyActor, TinyModel
from tests.families.rows import make_row

V, K = 12, 4
RUN = RunSettings(vocab_size=V, seq_length=32)
HINTS: tuple[list[list[int]], ...] = ([[3, 4], [7]], [], [[9, 8, 2]])


class ModelScorer:
    """A teacher service whose model is the tiny one."""

    def __init__(self) -> None:
        self.model = TinyModel(V, seed=1)
        self.asked: list[str] = []

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
        self.asked = [request.sample_id for request in requests]
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> TeacherScores:
        length = len(request.tokens) - request.start
        row = replace(make_row("t", length=length), tokens=request.tokens, prompt_length=request.start)
        with torch.no_grad():
            table = torch.log_softmax(self.model(row)[:, :V].float(), -1)
        best = table.topk(request.top_k)
        sampled = table.gather(1, torch.as_tensor(request.tokens[request.start :], dtype=torch.int64)[:, None])[:, 0]
        return TeacherScores(sampled.numpy(), best.indices.int().numpy(), best.values.numpy())


def rows() -> list[Row]:
    draw = np.random.default_rng(0)
    made = []
    for number, prompts in enumerate(HINTS):
        row = replace(make_row(f"s{number}", length=number + 2), temperature=1.0)
        ids = np.stack([draw.permutation(V)[:K] for _ in range(row.response_length)]).astype(np.int32)
        ids[0, -1] = -1
        columns: dict[str, Column] = {
            SAMPLER_IDS: ids,
            HINT_TOKENS: np.asarray([token for prompt in prompts for token in prompt], dtype=np.int32),
            HINT_LENGTHS: np.asarray([len(prompt) for prompt in prompts], dtype=np.int32),
        }
        made.append(replace(row, columns=columns))
    return made


def taught(made: Sequence[Row], **options: JsonValue) -> Sequence[TrainRow]:
    """After the workers' hook."""
    actor = TinyActor(make_family("openclawrl", {"top_k": K, **options}).bind(RUN), RUN, TinyModel(V, seed=1))
    actor.keep_weights("openclawrl_base")
    weights = RowWeights(1.0, 1.0, 1.0)
    return actor.prepared([TrainRow(row, row.loss_mask, weights, None, dict(row.columns)) for row in made])


def asked(made: Sequence[Row], scorer: ModelScorer | None, **options: JsonValue) -> Batch:
    family = make_family("openclawrl", {"top_k": K, "teacher": "service", **options}).bind(RUN)
    return family.prepare_rollout(Batch("job-1", 1, tuple(made)), JobContext("1:0", datetime.now(UTC), scorer))


@pytest.mark.parametrize("subset", ["overlap", "teacher"])
@pytest.mark.parametrize("selection", ["shortest", "token_optimal", "sequence_optimal"])
def test_the_lesson_is_that_of_the_base(subset: str, selection: str) -> None:
    options: dict[str, JsonValue] = {"subset": subset, "hint_selection": selection}
    scorer = ModelScorer()
    through = asked(rows(), scorer, **options).rows
    assert scorer.asked == ["s0/hint-0", "s0/hint-1", "s1/hint-0", "s2/hint-0"]
    assert through[0].columns[SERVICE_IDS].shape == (2 * 2, K)
    for want, got in zip(taught(rows(), **options), taught(through, teacher="service", **options), strict=True):
        for name in (TEACHER_IDS, HINT_OVERLAP):
            np.testing.assert_array_equal(got.columns[name], want.columns[name])
        told, wanted = (each.columns[TEACHER_LOG_PROBS].astype("float32") for each in (got, want))
        np.testing.assert_allclose(told, wanted, atol=1e-5)


def test_the_service_needs_no_base_and_the_trainer_needs_the_service() -> None:
    family = make_family("openclawrl", {"teacher": "service", "subset": "teacher"})
    assert family.driver_options == (TEACHER_ENGINE,)
    assert not family.configure_backend(RUN).frozen_base
    plain = make_family("openclawrl", {})
    assert plain.driver_options == () and plain.configure_backend(RUN).frozen_base
    with pytest.raises(BadConfiguration, match="set ATOLL_TRAINER_TEACHER or teacher base"):
        asked(rows(), None, subset="teacher")


def test_ids_that_the_engine_chose_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="subset student needs the teacher's log-probs at ids that the engine chose"):
        make_family("openclawrl", {"teacher": "service"})


def test_another_temperature_is_refused_naming_the_sample() -> None:
    made = [*rows()[:2], replace(rows()[2], temperature=0.7)]
    with pytest.raises(InvalidInput, match=r"sample s2: a teacher service scores at temperature 1, got 0\.7"):
        asked(made, ModelScorer(), subset="teacher")


def test_an_id_that_the_student_does_not_have_is_refused_naming_the_sample() -> None:
    class Wider(ModelScorer):
        def score(self, requests: Sequence[ScoreRequest]) -> Sequence[TeacherScores]:
            found = super().score(requests)
            last = found[-1].top_k_ids
            assert last is not None
            last[-1, -1] = V
            return found

    with pytest.raises(InvalidInput, match=r"sample s2: the teacher chose ids \d+\.\.12, the student has .* \[0, 12\)"):
        asked(rows(), Wider(), subset="teacher")
