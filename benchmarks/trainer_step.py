"""One optimizer step of the Megatron backend against plain transformers with torch's AdamW, on the same rows.

    python benchmarks/trainer_step.py [--model DIR] [--tensor 1] [--data 1] [--rows 8] [--tokens 128] [--steps 5]

Both sides run in float32 on as many threads in all, alternate step by step, and take the same loss from the same
weights; the first step of each warms up and is left out, and its losses must agree. The last line is
`trainer_step: ratio=<Megatron's median time over transformers'> cpu_ratio=<the same of CPU seconds> ...`: on a machine
that does other work the second is the one to read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from atoll.common import torchvision_shim
from atoll.families.catalog import make_family
from atoll.families.rows import Batch, Row
from atoll.families.run_settings import RunSettings
from atoll.families.steps import TrainStep, build_train_steps
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import AdamW, MegatronSettings, ParallelLayout
from atoll.trainer.workers.local import LocalWorkerGroup

LEARNING_RATE = 1e-4
OPTIMIZER = AdamW(weight_decay=0.1, clip_grad=1.0)


def save_model(directory: Path) -> None:
    """A Qwen3 of 11 million parameters with random weights."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(directory)


def make_step(rows: int, tokens: int, vocab: int) -> tuple[FamilyBinding, TrainStep]:
    """Rows of which half is the prompt, in groups of 4, as grpo trains them."""
    draw = np.random.default_rng(0)
    response = tokens // 2
    batch = Batch(
        "job-benchmark",
        1,
        tuple(
            Row(
                sample_id=f"s{i}",
                rollout_id=f"r{i}",
                group_id=f"g{i // 4}",
                tokens=draw.integers(0, vocab, tokens).astype(np.int32),
                prompt_length=tokens - response,
                loss_mask=np.ones(response, np.uint8),
                rollout_log_probs=draw.normal(-8, 0.3, response).astype(np.float32),
                temperature=0.7,
                reward=float(draw.random()),
            )
            for i in range(rows)
        ),
    )
    binding = FamilyBinding("grpo", {"groups_per_step": rows // 4}, RunSettings(vocab, tokens))
    family = make_family(binding.reference, binding.options)
    (step,) = build_train_steps(family, batch, family.prepare(batch, {}))
    return binding, step


class PlainTrainer:
    """What a careful user of transformers writes for equal rows: one batch, logits of the responses only."""

    def __init__(self, directory: Path, step: TrainStep) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        groups = [
            {"params": [p for p in self._model.parameters() if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in self._model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=betas, eps=OPTIMIZER.epsilon)
        self._ids = torch.as_tensor(np.stack([item.row.tokens for item in step.rows]), dtype=torch.int64)
        self._response = step.rows[0].row.response_length
        self._temperature = step.rows[0].row.temperature
        self._advantages = torch.as_tensor(np.stack([np.asarray(item.advantages) for item in step.rows]))
        self._weights = torch.tensor([item.weights.policy for item in step.rows], dtype=torch.float32)[:, None]

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        self._optimizer.zero_grad()
        # One more than the response: the last prompt token predicts its first token.
        logits = self._model(self._ids, use_cache=False, logits_to_keep=self._response + 1).logits[:, :-1]
        log_probs = torch.log_softmax(logits.float() / self._temperature, -1)
        now = log_probs.gather(2, self._ids[:, -self._response :, None])[..., 0]
        ratio = torch.exp(now - now.detach())
        surrogate = torch.maximum(-self._advantages * ratio, -self._advantages * ratio.clamp(0.8, 1.2))
        loss = (surrogate * self._weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.clip_grad)
        self._optimizer.step()
        return loss.item()


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description="Trainer step against plain transformers.")
    parser.add_argument("--model", type=Path, help="a model directory; default: a random Qwen3 of 11M parameters")
    for name, default in (("tensor", 1), ("data", 1), ("rows", 8), ("tokens", 128), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torchvision_shim.install()
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as scratch:
        compare(arguments, Path(scratch))


def compare(arguments: argparse.Namespace, scratch: Path) -> None:
    """Alternate the two sides and print each step."""
    directory = arguments.model or scratch / "model"
    if arguments.model is None:
        save_model(directory)
    layout = ParallelLayout(arguments.tensor, arguments.data)
    backend = MegatronBackend(MegatronSettings(layout, optimizer=OPTIMIZER), LocalWorkerGroup, scratch / "logs")
    try:
        import transformers

        vocab = transformers.AutoConfig.from_pretrained(directory).vocab_size
        binding, step = make_step(arguments.rows, arguments.tokens, vocab)
        backend.load(directory, None, None)
        plain = PlainTrainer(directory, step)
        ours, theirs = Timing("megatron"), Timing("transformers")
        for number in range(arguments.steps + 1):
            with ours.measured():
                (metrics,) = backend.train(binding, [step], [LEARNING_RATE]).metrics
            with theirs.measured():
                loss = plain.step()
            if number == 0 and abs(metrics["loss"] - loss) > 1e-4:
                raise SystemExit(f"the losses differ: megatron {metrics['loss']}, transformers {loss}")
            print(f"step {number}: megatron {ours.wall[-1]:.3f} s, transformers {theirs.wall[-1]:.3f} s", flush=True)
    finally:
        backend.close()
    print(
        f"trainer_step: ratio={ours.median_wall / theirs.median_wall:.2f}"
        f" cpu_ratio={ours.median_cpu / theirs.median_cpu:.2f}"
        f" megatron={ours.median_wall:.3f}s transformers={theirs.median_wall:.3f}s tensor={layout.tensor}"
        f" data={layout.data} rows={arguments.rows} tokens={arguments.tokens} threads={torch.get_num_threads()}"
    )


@dataclass
class Timing:
    """Seconds of each step of one side, the first being the warm-up."""

    name: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time the block."""
        wall, cpu = time.perf_counter(), _cpu_seconds()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(_cpu_seconds() - cpu)

    @property
    def median_wall(self) -> float:
        """Without the warm-up."""
        return statistics.median(self.wall[1:])

    @property
    def median_cpu(self) -> float:
        """Without the warm-up, over this process and its workers."""
        return statistics.median(self.cpu[1:])


def _cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])


if __name__ == "__main__":
    main()
