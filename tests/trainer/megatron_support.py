"""Tiny models, rows and shared worker groups for the tests of the Megatron backend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from atoll.families.catalog import make_family
from atoll.families.rows import Batch, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainStep, build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.backend import MegatronBackend, Timeouts
from atoll.trainer.megatron.settings import AdamW, MegatronSettings, MicroBatchLimit, ParallelLayout
from atoll.trainer.workers.group import WorkerGroup, WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup

VOCAB = 1100
CLIP = 0.05
WEIGHT_DECAY = 0.1
EPSILON = 1e-4
"""Large, so that rounding in a gradient near 0 does not decide the direction of a whole step."""


class SharedGroup:
    """A worker group that outlives the backends of single tests."""

    def __init__(self, group: LocalWorkerGroup) -> None:
        self.group = group
        self.size = group.size

    def call(self, method: str, arguments: Sequence[tuple[object, ...]], timeout_s: float) -> list[object]:
        return self.group.call(method, arguments, timeout_s)

    def alive(self) -> bool:
        return self.group.alive()

    def kill(self) -> None:
        self.group.kill()

    def close(self) -> None:
        """Left to the session."""


@dataclass
class Pool:
    """Backends over one group of workers for each layout."""

    log_directory: Path
    groups: dict[ParallelLayout, SharedGroup]

    def backend(
        self,
        tensor: int,
        data: int,
        micro_batch: MicroBatchLimit | None = None,
        *,
        pipeline: int = 1,
        context: int = 1,
    ) -> MegatronBackend:
        return self.of(ParallelLayout(tensor, data, pipeline, context), micro_batch)

    def of(self, layout: ParallelLayout, micro_batch: MicroBatchLimit | None = None) -> MegatronBackend:
        optimizer = AdamW(epsilon=EPSILON, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
        # 1,280 columns on one rank and 1,536 on two: a checkpoint that moves between them is cut and padded anew.
        settings = MegatronSettings(layout, micro_batch or MicroBatchLimit(), optimizer, vocabulary_multiple=256)

        def launch(plan: WorkerPlan) -> WorkerGroup:
            # The driver cuts micro-batches of training; forward-only passes keep the limit of the first backend here.
            if layout not in self.groups or not self.groups[layout].alive():
                self.groups[layout] = SharedGroup(LocalWorkerGroup(plan))
            return self.groups[layout]

        logs = self.log_directory / f"tp{layout.tensor}-dp{layout.data}-pp{layout.pipeline}-cp{layout.context}"
        return MegatronBackend(settings, launch, logs, Timeouts(), target="tests.trainer.megatron_probe:ProbedRank")

    def probe(self, tensor: int, data: int, what: str) -> dict[str, npt.NDArray[np.float32]]:
        """``gradients`` or ``weights`` as rank 0 gathers them."""
        return self.probe_of(ParallelLayout(tensor, data), what)

    def probe_of(self, layout: ParallelLayout, what: str) -> dict[str, npt.NDArray[np.float32]]:
        """``gradients`` or ``weights`` as rank 0 gathers them."""
        group = self.groups[layout]
        found: dict[str, npt.NDArray[np.float32]] = group.call(what, [()] * group.size, 60.0)[0]  # type: ignore[assignment]
        return found


@dataclass(frozen=True)
class ModelKind:
    """A tiny model to make. Example: `ModelKind("llama", tied=True)`."""

    family: str
    tied: bool = False
    seed: int = 0
    rope: str = "default"


def save_tiny_model(kind: ModelKind, directory: Path) -> None:
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind.family]
    rope: dict[str, object] = {"rope_type": kind.rope, "rope_theta": 10000.0}
    if kind.rope == "llama3":
        lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        rope |= {"factor": 8.0, **lengths}
    if kind.rope == "linear":
        rope |= {"factor": 4.0}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind.tied,
        rope_parameters=rope,
        max_position_embeddings=4096,
        initializer_range=0.1,
        rms_norm_eps=1e-5,
        **({"head_dim": 16} if kind.family == "qwen3" else {}),
    )
    torch.manual_seed(kind.seed)
    model = model_class(config).float()
    with torch.no_grad():  # norms of 1 and biases of 0 would hide a mix-up
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def make_rows(seed: int = 0, groups: int = 4, per_group: int = 4) -> tuple[Row, ...]:
    """Rows of unequal lengths at two temperatures, some tokens masked, rewards that differ within a group."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(groups * per_group):
        prompt, response = int(draw.integers(1, 12)), int(draw.integers(1, 24))
        mask = (draw.random(response) < 0.8).astype(np.uint8)
        mask[-1] = 1
        rows.append(
            Row(
                sample_id=f"sample-{number}",
                rollout_id=f"rollout-{number}",
                group_id=f"group-{number // per_group}",
                tokens=draw.integers(0, VOCAB, prompt + response).astype(np.int32),
                prompt_length=prompt,
                loss_mask=mask,
                rollout_log_probs=draw.normal(-7, 0.3, response).astype(np.float32),
                temperature=(1.0, 0.7)[number % 2],
                reward=float(draw.random()),
            )
        )
    return tuple(rows)


GRPO_OPTIONS = {"groups_per_step": 4, "n_samples_per_prompt": 4}


def grpo_binding(**options: float | int | bool | str) -> FamilyBinding:
    run = RunSettings(vocab_size=VOCAB, seq_length=64, has_reference=True)
    return FamilyBinding("grpo", {**GRPO_OPTIONS, **options}, run)


def grpo_steps(rows: Sequence[Row], binding: FamilyBinding) -> tuple[TrainStep, ...]:
    family = make_family(binding.reference, binding.options)
    batch = Batch("job-test", 1, tuple(rows))
    return build_train_steps(family, batch, family.prepare(batch, {}))


def with_advantage(step: TrainStep, index: int, token: int, value: float) -> TrainStep:
    """The same step with one advantage replaced."""
    item = step.rows[index]
    assert item.advantages is not None
    advantages = item.advantages.copy()
    advantages[token] = value
    rows = list(step.rows)
    rows[index] = replace(item, advantages=advantages)
    return TrainStep(tuple(rows))
