"""Core attention under context parallel, and the adapter's refusal."""

from pathlib import Path

import numpy as np
import pytest
import torch
from atoll.trainer.megatron.cpu import install_cpu_adapter
from atoll.trainer.megatron.modules import PackedCoreAttention
from atoll.trainer.megatron.packing import ContextPlace, pack, zigzag_positions
from atoll.trainer.workers.group import WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.trainer.context_probe import packed_inputs

LENGTHS = [8, 16, 4]


def attend_over(size: int, logs: Path) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Output and input gradients in the pack's order, put together from all ranks."""
    group = LocalWorkerGroup(WorkerPlan("tests.trainer.context_probe:ContextRank", size, {}, logs))
    try:
        answers = group.call("attend", [(LENGTHS,)] * size, 60)
    finally:
        group.close()
    pieces = [piece for piece in answers if isinstance(piece, tuple)]
    order = np.argsort(np.concatenate([held for held, _ in pieces]))
    return [np.concatenate([found[i] for _, found in pieces])[order] for i in range(4)]


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


def test_a_rank_holds_its_zigzag_share_of_padded_rows_and_knows_what_it_predicts() -> None:
    rows = [(np.arange(10, 16, dtype=np.int32), 2), (np.array([7], dtype=np.int32), 1)]
    shares = [pack(rows, torch.device("cpu"), ContextPlace(2, rank)) for rank in (0, 1)]
    assert [share.ids.tolist() for share in shares] == [[[10, 11, 0, 0, 7, 0]], [[12, 13, 14, 15, 0, 0]]]
    assert shares[0].positions.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert [share.predictors.tolist() for share in shares] == [[1], [0, 1, 2]]
    assert [share.response_positions[0].tolist() for share in shares] == [[0], [1, 2, 3]]
    assert [len(share.response_positions[1]) for share in shares] == [0, 0]
    assert shares[0].boundaries.cu_seqlens_q.tolist() == [0, 8, 12]


def test_attention_over_two_context_ranks_equals_plain_softmax(tmp_path: Path) -> None:
    answers = attend_over(2, tmp_path)
    query, key, value, gradient = (x.double().requires_grad_() for x in packed_inputs(LENGTHS))
    rows = []
    for q, k, v in zip(*(torch.split(x, LENGTHS) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
    output = torch.cat(rows)
    output.backward(gradient.detach())  # type: ignore[no-untyped-call]
    for found, wanted in zip(answers, [output, query.grad, key.grad, value.grad], strict=True):
        assert wanted is not None
        assert np.abs(found - wanted.detach().numpy()).max() < 1e-5


def test_attention_refuses_rows_that_are_not_packed() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)

    class Groups:
        cp = None

    attention = PackedCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=Groups())
    rows = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match="packed rows"):
        attention(rows, rows, rows)


def test_the_cpu_adapter_is_refused_where_cuda_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.synchronize
    with pytest.raises(RuntimeError, match="CUDA is visible"):
        install_cpu_adapter()
    assert torch.cuda.synchronize is before
