"""Each kernel over the vocabulary against the naive dense form: time and peak memory, forward and backward.

    python benchmarks/kernels.py [--rows 512] [--vocabulary 49152 151936] [--repeats 3] [--device cpu] [--only NAME]

Logits are bfloat16, as a model makes them. The naive form is what one would write: everything in float32 at once, and
autograd. Both run on one shard; time is CPU seconds of the fastest repeat on a CPU (other work of the machine does not
count) and wall seconds on a GPU; memory is the peak beyond the inputs, the gradient of the logits included. The last
lines are the check of the sampler's heads (64 samples x 1,024 tokens x 128 ids) and
`kernels: time_ratio_max=<slowest kernel over its naive form> memory_ratio_max=<...>`.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from atoll.families.divergence_spec import DivergenceKind, DivergenceSpec, Estimator
from atoll.families.losses.divergence import (
    full_divergence,
    restricted_divergence,
    sampled_reverse_kl,
    teacher_log_prob_rows,
)
from atoll.families.losses.top_k import log_probs_at_top_ids, top_k_ids
from atoll.families.losses.vocab import VocabShard, log_probs_at_ids, log_sum_exp, token_statistics
from atoll.families.rows import Row
from atoll.families.sampler_heads import sampler_head_columns
from torch import Tensor

TEMPERATURE = 0.7
TOP_K = 128
BETA = 0.5


@dataclass(frozen=True)
class Inputs:
    """One batch of tokens on one shard."""

    logits: Tensor
    """bfloat16 [T, V], a leaf"""
    ids: Tensor
    """int64 [T]"""
    head: Tensor
    """int64 [T, K]"""
    temperatures: Tensor
    """float32 [T]"""
    teacher_rows: Tensor
    """float16 [T, V]"""
    teacher_at_ids: Tensor
    """float32 [T]"""
    teacher_at_head: Tensor
    """float32 [T, K]"""
    shard: VocabShard

    def naive_log_probs(self) -> Tensor:
        """float32 [T, V]"""
        return torch.log_softmax(self.logits.float() / self.temperatures[:, None], -1)

    def naive_teacher(self) -> Tensor:
        """float32 [T, V]"""
        return torch.log_softmax(self.teacher_rows.float(), -1)


@dataclass(frozen=True)
class Contest:
    """A kernel and its naive form; both return values whose sum is differentiated, or ids."""

    name: str
    kernel: Callable[[Inputs], Tensor]
    naive: Callable[[Inputs], Tensor]


def _statistics(x: Inputs) -> Tensor:
    stats = token_statistics(x.logits, x.ids, x.temperatures, x.shard)
    return stats.log_probs + stats.entropy


def _naive_statistics(x: Inputs) -> Tensor:
    log_p = x.naive_log_probs()
    return log_p.gather(1, x.ids[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1)


def _full(kind: DivergenceKind) -> Contest:
    def naive(x: Inputs) -> Tensor:
        return _naive_divergence(x.naive_log_probs(), x.naive_teacher(), kind)

    def kernel(x: Inputs) -> Tensor:
        return full_divergence(x.logits, x.teacher_rows, x.temperatures, x.shard, DivergenceSpec(kind, BETA))

    return Contest(f"{kind.value} divergence, whole vocabulary", kernel, naive)


def _restricted(kind: DivergenceKind, estimator: Estimator) -> Contest:
    def kernel(x: Inputs) -> Tensor:
        student = log_probs_at_top_ids(x.logits, x.head, x.temperatures, x.shard)
        return restricted_divergence(student, x.teacher_at_head, DivergenceSpec(kind, BETA), estimator)

    def naive(x: Inputs) -> Tensor:
        pair = [x.naive_log_probs().gather(1, x.head), x.teacher_at_head]
        if estimator is Estimator.TAIL:
            pair = [torch.cat([p, torch.log1p(-p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))], 1) for p in pair]
        else:
            pair = [torch.log_softmax(p, -1) for p in pair]
        return _naive_divergence(pair[0], pair[1], kind)

    return Contest(f"{kind.value} divergence, {TOP_K} ids, {estimator.value}", kernel, naive)


def _naive_divergence(student: Tensor, teacher: Tensor, kind: DivergenceKind) -> Tensor:
    match kind:
        case DivergenceKind.FORWARD:
            return (teacher.exp() * (teacher - student)).sum(-1)
        case DivergenceKind.REVERSE:
            return (student.exp() * (student - teacher)).sum(-1)
        case DivergenceKind.JSD:
            mixture = (BETA * teacher.exp() + (1 - BETA) * student.exp()).log()
            own, other = student.exp() * (student - mixture), teacher.exp() * (teacher - mixture)
            return (BETA * other + (1 - BETA) * own).sum(-1)


CONTESTS = (
    Contest(
        "log-sum-exp",
        lambda x: log_sum_exp(x.logits, x.temperatures, x.shard),
        lambda x: torch.logsumexp(x.logits.float() / x.temperatures[:, None], -1),
    ),
    Contest("log-prob and entropy", _statistics, _naive_statistics),
    Contest(
        f"log-probs at {TOP_K} ids",
        lambda x: log_probs_at_top_ids(x.logits, x.head, x.temperatures, x.shard).sum(-1),
        lambda x: x.naive_log_probs().gather(1, x.head).sum(-1),
    ),
    Contest(
        f"top {TOP_K} ids, ties by id",
        lambda x: top_k_ids(x.logits, TOP_K, x.shard),
        lambda x: x.logits.detach().float().sort(dim=-1, descending=True, stable=True).indices[:, :TOP_K],
    ),
    Contest(
        "teacher rows in float16",
        lambda x: teacher_log_prob_rows(x.logits, x.temperatures, x.shard),
        lambda x: x.naive_log_probs().detach().clamp(min=-1e4).half(),
    ),
    *map(_full, DivergenceKind),
    *(_restricted(kind, each) for kind in DivergenceKind for each in (Estimator.RENORMALIZED, Estimator.TAIL)),
    Contest(
        "sampled reverse KL",
        lambda x: sampled_reverse_kl(log_probs_at_ids(x.logits, x.ids, x.temperatures, x.shard), x.teacher_at_ids),
        lambda x: sampled_reverse_kl(x.naive_log_probs().gather(1, x.ids[:, None])[:, 0], x.teacher_at_ids),
    ),
)


def make_inputs(rows: int, vocabulary: int, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16)
    teacher = torch.empty(rows, vocabulary, dtype=torch.float16)
    for row in range(rows):  # row by row, so that making the inputs is no peak of its own
        noise = torch.randn(2, vocabulary, generator=generator)
        logits[row] = 3 * noise[0]
        teacher[row] = torch.log_softmax(3 * noise[0] + noise[1], -1)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator)
    shard = VocabShard(vocabulary)
    head = top_k_ids(teacher.float(), TOP_K, shard)
    return Inputs(
        logits=logits.to(device).requires_grad_(),
        ids=ids.to(device),
        head=head.to(device),
        temperatures=torch.full((rows,), TEMPERATURE, device=device),
        teacher_rows=teacher.to(device),
        teacher_at_ids=teacher.gather(1, ids[:, None])[:, 0].float().to(device),
        teacher_at_head=teacher.gather(1, head).float().to(device),
        shard=shard,
    )


def measure(form: Callable[[Inputs], Tensor], inputs: Inputs, repeats: int) -> tuple[float, float, Tensor]:
    """Seconds of the fastest repeat, mebibytes of peak beyond the inputs, and the values."""
    on_gpu = inputs.logits.is_cuda
    clock = time.perf_counter if on_gpu else time.process_time
    best = float("inf")
    for _ in range(repeats):
        inputs.logits.grad = None
        _reset_peak(on_gpu)
        before = _peak(on_gpu)
        start = clock()
        values = form(inputs)
        if values.requires_grad:
            torch.autograd.backward(values.sum())
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, clock() - start)
        memory = _peak(on_gpu) - before
    inputs.logits.grad = None
    return best, memory / 2**20, values.detach()


def _return_freed_memory_at_once() -> None:
    """glibc keeps freed blocks below a limit that grows with use; what it keeps would hide later peaks."""
    threshold_option = -3
    ctypes.CDLL(None).mallopt(threshold_option, 1 << 17)


def _reset_peak(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes what is resident now


def _peak(on_gpu: bool) -> int:
    if on_gpu:
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def head_check(samples: int = 64, tokens: int = 1024, top_k: int = 128, vocabulary: int = 151_936) -> float:
    """CPU seconds to check the heads of a batch."""
    draw = np.random.default_rng(0)
    row = Row(
        sample_id="s",
        rollout_id="s",
        group_id="s",
        tokens=draw.integers(0, vocabulary, tokens + 1, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.ones(tokens, dtype=np.uint8),
        rollout_log_probs=np.full(tokens, -2.0, dtype=np.float32),
        temperature=1.0,
        reward=0.0,
    )
    drawn = np.stack([draw.choice(vocabulary, top_k, replace=False) for _ in range(64)])
    ids = np.tile(drawn, (tokens // 64, 1)).astype(np.int32)
    ids[ids == row.response_tokens[:, None]] = vocabulary - 1  # a sampled token in its head would have to agree
    log_probs = np.tile(np.sort(draw.uniform(-12, -6, top_k).astype(np.float32))[::-1], (tokens, 1))
    start = time.process_time()
    for _ in range(samples):
        sampler_head_columns(row, row.loss_mask, ids, log_probs, top_k=top_k, vocab_size=vocabulary)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parser.parse_args()
    contests = [contest for contest in CONTESTS if arguments.only in contest.name]
    if not contests:
        parser.error(f"--only {arguments.only!r} is in none of: {', '.join(contest.name for contest in CONTESTS)}")
    _return_freed_memory_at_once()
    ratios: list[tuple[float, float]] = []
    for vocabulary in arguments.vocabulary:
        inputs = make_inputs(arguments.rows, vocabulary, arguments.device)
        size = inputs.logits.numel() * 2 / 2**20
        print(f"\nV {vocabulary:,}, {arguments.rows} tokens, logits of {size:.0f} MiB in bfloat16")
        print(f"{'':<42}{'kernel':>16}{'naive':>18}{'time':>8}{'memory':>8}")
        for contest in contests:
            seconds, memory, got = measure(contest.kernel, inputs, arguments.repeats)
            naive_seconds, naive_memory, want = measure(contest.naive, inputs, arguments.repeats)
            torch.testing.assert_close(got.double(), want.double(), rtol=2e-3, atol=2e-3)
            ratios.append((seconds / naive_seconds, memory / naive_memory))
            print(
                f"{contest.name:<42}{seconds:>7.2f} s{memory:>5.0f} MiB{naive_seconds:>7.2f} s{naive_memory:>7.0f} MiB"
                f"{ratios[-1][0]:>8.2f}{ratios[-1][1]:>8.2f}",
                flush=True,
            )
    print(f"\nhead check, 64 samples x 1,024 tokens x 128 ids: {head_check():.2f} s")
    print(f"kernels: time_ratio_max={max(t for t, _ in ratios):.2f} memory_ratio_max={max(m for _, m in ratios):.2f}")


if __name__ == "__main__":
    main()
