"""Inputs of the kernel tests: a teacher and a perturbed engine beside the shared case, and what each rank answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from atoll.families.divergence_spec import (
    DistillationSpec,
    DivergenceKind,
    DivergenceSpec,
    Estimator,
    ImportanceLevel,
    TeacherColumn,
)
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.distillation import distillation_loss
from atoll.families.losses.divergence import full_divergence, restricted_divergence, teacher_log_prob_rows
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.score_centering import ScoreCentering
from atoll.families.losses.top_k import log_probs_at_top_ids, top_k_ids
from atoll.families.losses.vocab import VocabShard
from atoll.families.policy_spec import PolicyGradientWeight
from atoll.families.sampler_heads import HEAD_IDS, HEAD_LOG_PROBS
from torch import Tensor

from tests.families.cases import VOCAB, Case, make_case, padded_columns

K = 20
BETA = 0.3
DTYPES = (torch.float32, torch.bfloat16)
KINDS = tuple(DivergenceKind)
SAMPLE_WEIGHTS = (1.0, 0.5, 2.0)
CAP = 1.3

_FORWARD, _REVERSE = DivergenceSpec(DivergenceKind.FORWARD), DivergenceSpec(DivergenceKind.REVERSE)
_JSD = DivergenceSpec(DivergenceKind.JSD, BETA)
_SEQUENCE = ImportanceLevel.SEQUENCE
DISTILLATIONS: Mapping[str, DistillationSpec] = {
    "full forward, sequence": DistillationSpec(_FORWARD, Estimator.FULL, CAP, _SEQUENCE),
    "full reverse": DistillationSpec(_REVERSE, Estimator.FULL),
    "full jsd, token": DistillationSpec(_JSD, Estimator.FULL, CAP),
    "tail jsd, token": DistillationSpec(_JSD, Estimator.TAIL, CAP),
    "tail reverse": DistillationSpec(_REVERSE, Estimator.TAIL),
    "renormalized forward, sequence": DistillationSpec(_FORWARD, Estimator.RENORMALIZED, CAP, _SEQUENCE),
    "sampled": DistillationSpec(_REVERSE, Estimator.SAMPLED),
    "sampled, token": DistillationSpec(_REVERSE, Estimator.SAMPLED, CAP),
}
CENTERED: Mapping[str, str] = {"sampled": "none", "sampled, token": "truncated"}
"""Distillations that score centering corrects -> the form of their weight."""
WEIGHTS: Mapping[str, PolicyGradientWeight] = {
    "none": PolicyGradientWeight.none(),
    "truncated": PolicyGradientWeight.truncated(CAP),
    "masked": PolicyGradientWeight.masked(0.6, 1.7),
}


@dataclass(frozen=True)
class Inputs:
    """What stands beside a case: log-probs over the whole vocabulary, float64 [T, V]."""

    teacher: Tensor
    """The teacher's, one column of probability 0 among them."""
    engine: Tensor
    """The sampler's: the policy's own logits, perturbed."""

    @property
    def teacher_rows(self) -> Tensor:
        """float16 [T, V] as the teacher's pass keeps them."""
        return self.teacher.clamp(min=-1e4).half()

    @property
    def engine_head(self) -> tuple[Tensor, Tensor]:
        """Ids and float32 log-probs [T, K] of the sampler's most likely ids."""
        top = self.engine.topk(K)
        return top.indices, top.values.float()


def log_policy(case: Case, *, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """The logits [S, V] in float64 (a leaf) and log p [T, V] computed from them."""
    logits = case.logits.double().requires_grad_(requires_grad)
    temperatures = case.batch(VocabShard(VOCAB)).temperatures.double()
    return logits, torch.log_softmax(logits[case.logit_rows] / temperatures[:, None], -1)


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(23)
    shape = (len(case.logit_rows), VOCAB)
    _, own = log_policy(case)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    teacher = own * 0.7 + 1.2 * noise
    teacher[:, 7] = -1e6
    engine = own + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Inputs(torch.log_softmax(teacher, -1), torch.log_softmax(engine, -1))


def top_ids(rows: Tensor, k: int = K) -> Tensor:
    """[T, K] by (value descending, id ascending), by sorting pairs."""
    ordered = [sorted(range(rows.shape[1]), key=lambda v, row=row: (-row[v], v))[:k] for row in rows.tolist()]  # type: ignore[misc]
    return torch.tensor(ordered)


def teacher_batch(case: Case, inputs: Inputs, shard: VocabShard, width: int) -> LossBatch:
    """The batch with all that the teacher and the sampler said; `width` columns of the rows are on this shard."""
    rows = torch.full((len(inputs.teacher), width * shard.size), torch.nan, dtype=torch.float16)
    rows[:, :VOCAB] = inputs.teacher_rows
    ids = top_ids(inputs.teacher)
    batch = case.batch(shard)
    head_ids, head_log_probs = inputs.engine_head
    columns = {
        TeacherColumn.ROWS.value: rows.chunk(shard.size, 1)[shard.rank],
        TeacherColumn.TOP_K_IDS.value: ids.int(),
        TeacherColumn.TOP_K_LOG_PROBS.value: inputs.teacher.gather(1, ids).float(),
        TeacherColumn.SAMPLED.value: inputs.teacher.gather(1, batch.tokens[:, None])[:, 0].float(),
        HEAD_IDS: head_ids.int(),
        HEAD_LOG_PROBS: head_log_probs,
    }
    return replace(batch, columns=columns)


def batch_of_case() -> LossBatch:
    """The float32 case on one shard."""
    case = make_case(dtype=torch.float32)
    return teacher_batch(case, make_inputs(case), VocabShard(VOCAB), padded_columns(1))


@dataclass(frozen=True)
class Answer:
    """What a rank computed: values, and the gradient of its columns."""

    values: Tensor
    gradient: Tensor
    metrics: Mapping[str, float]


def incoming(tokens: int) -> Tensor:
    """Incoming gradients of token values, of both signs."""
    return torch.linspace(-1.0, 1.7, tokens)


def _answer(logits: Tensor, compute: Callable[[], Tensor]) -> Answer:
    logits.grad = None
    values = compute()
    torch.autograd.backward((values * incoming(len(values)).to(values.dtype)).sum())
    assert logits.grad is not None
    return Answer(values.detach(), logits.grad, {})


def distillation_answer(
    spec: DistillationSpec, batch: LossBatch, logits: Tensor, centering: ScoreCentering | None = None
) -> tuple[Answer, list[bool]]:
    """Loss, metrics and gradient of the distillation loss; and the bad rows."""
    logits.grad = None
    reduce = Reducer(batch)
    weights = torch.tensor(SAMPLE_WEIGHTS)
    loss, metrics = distillation_loss(spec, batch, logits, reduce, weights, centering)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    found = {name: value.item() for name, value in metrics.items()}
    return Answer(loss.detach(), logits.grad, found), reduce.bad_rows.tolist()


def all_answers(shard: VocabShard) -> dict[str, Answer]:
    """Every kernel and loss on this rank, by name; runs on each rank."""
    answers: dict[str, Answer] = {}
    for dtype in DTYPES:
        case = make_case(dtype=dtype)
        inputs = make_inputs(case)
        width = padded_columns(shard.size) // shard.size
        batch = teacher_batch(case, inputs, shard, width)
        logits = case.columns(shard.size, shard.rank, padding=torch.nan)
        rows, temperatures = case.logit_rows, batch.temperatures
        name = f" {dtype}"
        ids = top_k_ids(logits, K, shard, logit_rows=rows, chunk_rows=5)
        answers["top_k" + name] = Answer(ids, torch.zeros(0), {})
        teacher_rows = teacher_log_prob_rows(logits, temperatures, shard, logit_rows=rows)
        answers["rows" + name] = Answer(teacher_rows, torch.zeros(0), {})
        chosen = batch.columns[TeacherColumn.TOP_K_IDS].long()
        teacher = batch.columns[TeacherColumn.TOP_K_LOG_PROBS]

        def at_ids(
            logits: Tensor = logits, chosen: Tensor = chosen, rows: Tensor = rows, temperatures: Tensor = temperatures
        ) -> Tensor:
            return log_probs_at_top_ids(logits, chosen, temperatures, shard, logit_rows=rows, chunk_rows=4)

        answers["log_probs" + name] = _answer(logits, lambda at_ids=at_ids: (at_ids() * incoming(K)).sum(-1))  # type: ignore[misc]
        for kind in KINDS:
            spec = DivergenceSpec(kind, BETA)
            answers[f"full {kind}{name}"] = _answer(
                logits,
                lambda batch=batch, logits=logits, spec=spec, rows=rows: full_divergence(  # type: ignore[misc]
                    logits,
                    batch.columns[TeacherColumn.ROWS],
                    batch.temperatures,
                    shard,
                    spec,
                    logit_rows=rows,
                    chunk_rows=4,
                ),
            )
            for estimator in (Estimator.RENORMALIZED, Estimator.TAIL):
                answers[f"{estimator} {kind}{name}"] = _answer(
                    logits,
                    lambda at_ids=at_ids, teacher=teacher, spec=spec, estimator=estimator: restricted_divergence(  # type: ignore[misc]
                        at_ids(), teacher, spec, estimator
                    ),
                )
        for title, distillation in DISTILLATIONS.items():
            answers[f"loss {title}{name}"] = distillation_answer(distillation, batch, logits)[0]
        for title, form in CENTERED.items():
            centering = ScoreCentering(WEIGHTS[form], K)
            answer = distillation_answer(DISTILLATIONS[title], batch, logits, centering)[0]
            answers[f"centered {title}{name}"] = answer
        for form, weight in WEIGHTS.items():
            answers[f"centering {form}{name}"] = centering_answer(ScoreCentering(weight, K), batch, logits)
    return answers


def centering_answer(centering: ScoreCentering, batch: LossBatch, logits: Tensor) -> Answer:
    """The term alone, with the batch's own advantages."""
    logits.grad = None
    reduce = Reducer(batch)
    assert batch.advantages is not None
    term, metrics = centering(batch, logits, reduce.neutral(batch.advantages), reduce)
    torch.autograd.backward(term)
    assert logits.grad is not None
    return Answer(term.detach(), logits.grad, {name: value.item() for name, value in metrics.items()})


def joined_gradient(ranks: "list[dict[str, Answer]]", name: str) -> Tensor:
    """[S, V] of all shards, in float64; checks that padding got none."""
    gradient = torch.cat([rank[name].gradient for rank in ranks], 1)
    assert gradient.shape[1] == padded_columns(len(ranks)) > VOCAB
    assert bool((gradient[:, VOCAB:] == 0).all())
    return gradient[:, :VOCAB].double()


def assert_gradient(got: Tensor, want: Tensor, dtype: torch.dtype, relative: float = 1e-5) -> None:
    """Per position, relative to the largest entry; a bfloat16 gradient is rounded to 8 bits."""
    tolerance = 2.0**-8 if dtype is torch.bfloat16 else relative
    scale = want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert float(((got - want) / scale).abs().max()) <= tolerance
