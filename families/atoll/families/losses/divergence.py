"""Divergences to a teacher over the whole vocabulary, split into shards, or over K ids; exact gradients.

For a sum over the vocabulary of f_v(p_v), with g_v = df_v/dp_v and z = x / T:

    d/dz_u sum_v f_v(p_v) = p_u (g_u - sum_v p_v g_v)

    forward  KL(T||S): p_u - t_u                            reverse  KL(S||T): p_u (log p_u - log t_u - KL)
    jsd: (1 - b) p_u (log p_u - log m_u - KL(S||M))

The sums over v lie in numbers that forward has reduced over the shards and saved, so backward needs no communication.
Chunks of rows are computed again in backward: no more than one is held in float32.
"""

import math

import torch
import torch.distributed as dist
from atoll.families.divergence_spec import DivergenceKind, DivergenceSpec, Estimator
from atoll.families.losses.vocab import (
    Columns,
    VocabShard,
    all_reduce,
    check_inputs,
    log_sum_exp,
    row_chunks,
    rows_of_a_chunk,
)
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

FLOOR = -1e4
"""Lowest log-prob of a teacher row: float16 ends at -65504, and exp(-1e4) is 0 in float32."""

MAX_HEAD_LOG_MASS = -1e-7
"""Of K ids in front of a tail: above it float32 has no tail left, and its logarithm would be -inf."""


@torch.no_grad()
def teacher_log_prob_rows(
    logits: Tensor, temperatures: Tensor, shard: VocabShard, *, logit_rows: Tensor | None = None
) -> Tensor:
    """float16 [T, V_local]: log-probs over this shard, not below `FLOOR`, which padded columns hold too.

    logits [S, V_local], temperatures float32 [T]. Collective over `shard.group`.
    """
    lse = log_sum_exp(logits, temperatures, shard, logit_rows=logit_rows)
    columns = Columns.of(logits, shard)
    rows = torch.full((len(lse), logits.shape[1]), FLOOR, dtype=torch.float16, device=logits.device)
    for chunk in row_chunks(len(lse), rows_of_a_chunk(logits)):
        log_p = columns.scaled(logits, temperatures, logit_rows, chunk).sub_(lse[chunk, None])
        rows[chunk, : columns.count] = log_p.clamp_(min=FLOOR).half()
    return rows


def full_divergence(
    logits: Tensor,
    teacher_rows: Tensor,
    temperatures: Tensor,
    shard: VocabShard,
    spec: DivergenceSpec,
    *,
    logit_rows: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """The divergence of every token [T] over the whole vocabulary, float32, differentiable by the logits.

    logits [S, V_local]; teacher_rows [T, V_local], log-probs of any float type, which are renormalised in float32 over
    all shards; a teacher's probability of 0 contributes 0. `logit_rows` int64 [T] selects the position of each token.
    Collective over `shard.group`. A token whose incoming gradient is 0 gets gradient 0, whatever its inputs hold.
    Raises: ValueError for shapes that do not fit.
    """
    check_inputs(logits, torch.zeros(len(temperatures), dtype=torch.int64), temperatures, shard, logit_rows)
    if teacher_rows.shape != (len(temperatures), logits.shape[1]):
        raise ValueError(
            f"teacher rows [{len(temperatures)}, {logits.shape[1]}] expected, as wide as this shard of the logits, "
            f"got {tuple(teacher_rows.shape)}"
        )
    output: Tensor = _FullDivergence.apply(  # type: ignore[no-untyped-call]
        logits, teacher_rows, temperatures, logit_rows, shard, spec, chunk_rows or rows_of_a_chunk(logits)
    )
    return output


class _FullDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        teacher_rows: Tensor,
        temperatures: Tensor,
        logit_rows: Tensor | None,
        shard: VocabShard,
        spec: DivergenceSpec,
        chunk_rows: int,
    ) -> Tensor:
        columns = Columns.of(logits, shard)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        # Log-sum-exp of the student and of the teacher, and the part of the value that KL(S || .) is.
        lse = torch.empty(len(temperatures), 2, dtype=dtype, device=logits.device)
        values, own = torch.empty(2, len(temperatures), dtype=dtype, device=logits.device).unbind()
        for chunk in row_chunks(len(temperatures), chunk_rows):
            z = columns.scaled(logits, temperatures, logit_rows, chunk)
            teacher = teacher_rows[chunk, : columns.count].to(dtype, copy=True)
            empty = z.new_full((len(z),), -torch.inf)
            tops = torch.stack([x.amax(-1) if columns.count else empty for x in (z, teacher)], 1)
            all_reduce(tops, dist.ReduceOp.MAX, shard)
            sums = torch.stack([(x - top[:, None]).exp_().sum(-1) for x, top in zip((z, teacher), tops.T, strict=True)])
            all_reduce(sums, dist.ReduceOp.SUM, shard)
            lse[chunk] = tops + sums.T.log()
            z -= lse[chunk, :1]
            teacher -= lse[chunk, 1:]
            parts = torch.stack(_parts(z, teacher, spec), 1)
            all_reduce(parts, dist.ReduceOp.SUM, shard)
            values[chunk], own[chunk] = parts.unbind(1)
        ctx.save_for_backward(logits, teacher_rows, temperatures, logit_rows, lse, own)  # type: ignore[arg-type]
        ctx.columns, ctx.spec, ctx.chunk_rows = columns, spec, chunk_rows  # type: ignore[attr-defined]
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher_rows, temperatures, logit_rows, lse, own = ctx.saved_tensors  # type: ignore[attr-defined]
        columns: Columns = ctx.columns  # type: ignore[attr-defined]
        grad_logits = torch.zeros_like(logits)
        for chunk in row_chunks(len(temperatures), ctx.chunk_rows):  # type: ignore[attr-defined]
            if not columns.count:
                break
            student = columns.scaled(logits, temperatures, logit_rows, chunk).sub_(lse[chunk, :1])
            teacher = teacher_rows[chunk, : columns.count].to(student.dtype, copy=True).sub_(lse[chunk, 1:])
            grad = _slopes(student, teacher, own[chunk, None], ctx.spec)  # type: ignore[attr-defined]
            grad *= grad_values[chunk, None]
            columns.add_gradient(grad_logits, grad, grad_values[chunk] == 0, temperatures, logit_rows, chunk)
        return grad_logits, None, None, None, None, None, None


def _parts(student: Tensor, teacher: Tensor, spec: DivergenceSpec) -> tuple[Tensor, Tensor]:
    """From log-probs [n, count]: this shard's part of the divergence [n], and of KL(S || T or M) [n]."""
    match spec.kind:
        case DivergenceKind.FORWARD:
            value = _kl(teacher, student)
            return value, torch.zeros_like(value)
        case DivergenceKind.REVERSE:
            value = _kl(student, teacher)
            return value, value
        case DivergenceKind.JSD:
            mixture = _mixture(student, teacher, spec.beta)
            own = _kl(student, mixture)
            return spec.beta * _kl(teacher, mixture) + (1 - spec.beta) * own, own


def _slopes(student: Tensor, teacher: Tensor, own: Tensor, spec: DivergenceSpec) -> Tensor:
    """d/dz [n, count] of the divergence; `own` [n, 1] is KL(S || T or M). May overwrite its inputs."""
    p = student.exp()
    if spec.kind is DivergenceKind.FORWARD:
        return p.sub_(teacher.exp_())
    target = teacher if spec.kind is DivergenceKind.REVERSE else _mixture(student, teacher, spec.beta)
    # Where p is 0 there is no gradient; -inf would make 0 * inf of it.
    log_ratio = (student - target).masked_fill_(p == 0, 0)
    slopes = log_ratio.sub_(own).mul_(p)
    return slopes if spec.kind is DivergenceKind.REVERSE else slopes.mul_(1 - spec.beta)


def _kl(of: Tensor, against: Tensor) -> Tensor:
    """sum_v of (log of - log against) [n] from log-probs [n, count]; a probability of 0 contributes 0."""
    p = of.exp()
    return (of - against).masked_fill_(p == 0, 0).mul(p).sum(-1)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log(b T + (1 - b) S) from log-probs."""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def restricted_divergence(student: Tensor, teacher: Tensor, spec: DivergenceSpec, estimator: Estimator) -> Tensor:
    """The divergence [T] over K ids, renormalised over them or with one bucket for the rest.

    student, teacher: log-probs [T, K] of the whole vocabulary at the same ids; the student's come from
    `log_probs_at_top_ids`, whose gradient holds the coupling over the vocabulary. A tail is 1 - (mass of the K ids):
    float32 holds its logarithm to 1e-5 only where the tail is above 1e-2.
    """
    teacher = teacher.clamp(min=FLOOR)
    match estimator:
        case Estimator.RENORMALIZED:
            student, teacher = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
        case Estimator.TAIL:
            student, teacher = _with_tail(student), _with_tail(teacher)
        case _:
            raise ValueError(f"a divergence over K ids is renormalized or has a tail, got {estimator.value}")
    return _parts(student, teacher, spec)[0]


def _with_tail(log_probs: Tensor) -> Tensor:
    head = torch.logsumexp(log_probs, -1, keepdim=True)
    return torch.cat([log_probs, torch.log(-torch.expm1(head.clamp(max=MAX_HEAD_LOG_MASS)))], -1)


def sampled_reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(S || T) estimated at the sampled token: value gap = l - l_T, gradient gap * grad l; all [T]."""
    gap = (log_probs - teacher_log_probs).detach()
    return gap + gap * (log_probs - log_probs.detach())
