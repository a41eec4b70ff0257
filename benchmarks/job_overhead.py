"""What a training job costs beside its step: staging, commit and publish; and how long a crash keeps a trainer away.

    python -m benchmarks.job_overhead [--jobs 8] [--fake-engine]

A deployment in processes of its own (registry, gateway, trainer with one rank, one engine) trains a model of 11
million parameters from chats and reports. Prints medians, each beside the baseline that it is a ratio of:

    step       optimizer step of the workers, pull and preparation not counted            1
    stage      export of weights and checkpoint, hashes, seal                             of the step, and of a copy of
                                                                                          the same files to the disk
    commit     CommitVersion as the trainer sees it                                       of the step
    publish    from the commit until the engine answers with the version                  of a plain copy of the weights
    restart    from a SIGKILL of the trainer to the commit of a job that waits for it     of a process that only imports
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import aiohttp
from atoll.common import torchvision_shim
from atoll.engine.models.tiny import make_tiny

from tests.chaos.databases import read_registry
from tests.chaos.deployment import GROUPS, SCENARIO, TOKEN, Shape
from tests.chaos.stage import Stage, stage

STAGING = ("export", "hash", "seal")
LEASE_TTL_S = 3.0
RESTARTS = 3


def make_model(directory: Path) -> Path:
    """A Qwen3 of 11 million parameters with random weights, and the tiny model's tokenizer."""
    import transformers

    torchvision_shim.install()
    make_tiny(directory, 0)
    config = transformers.AutoConfig.from_pretrained(directory)
    sizes = {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192}
    for name, value in {**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(directory)
    return directory


def plain_copy(sources: Sequence[Path], scratch: Path, *, synced: bool) -> float:
    """Seconds to copy directories once. synced: until the copies are on the disk."""
    started = time.perf_counter()
    for number, source in enumerate(sources):
        shutil.copytree(source, scratch / str(number))
    if synced:
        for path in scratch.rglob("*"):
            with path.open("rb") if path.is_file() else nullcontext() as file:
                if file is not None:
                    os.fsync(file)
    took = time.perf_counter() - started
    shutil.rmtree(scratch)
    return took


def plain_import() -> float:
    """Seconds of a process that imports what a trainer's worker does, and ends."""
    started = time.perf_counter()
    program = "import torch, transformers, megatron.core.optimizer, megatron.core.models.gpt"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    return time.perf_counter() - started


async def trained(here: Stage, name: str) -> Mapping[str, float]:
    """One job: what it tells of itself once an engine serves its version."""
    head = here.observer.head
    await here.feed(name)
    await here.until_head(head + 1)
    await here.until_served()
    job_id = read_registry(here.deployment.registry_database, SCENARIO).versions[-1].job_id
    url = f"{here.deployment.gateway_url}/atoll/scenarios/{SCENARIO}/jobs/{job_id}"
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session:
        while True:
            async with session.get(url) as answer:
                job = await answer.json()
            if job["state"] == "served":
                metrics: Mapping[str, float] = job["metrics"]
                return metrics
            await asyncio.sleep(0.05)


async def restarted(here: Stage, name: str) -> tuple[float, float]:
    """Seconds from the death of the trainer to its next answer, and to the commit of a job that waits for it."""
    trainer, head = here.deployment["trainer-1"], here.observer.head
    await trainer.kill()
    started = time.perf_counter()
    await trainer.start()
    feeding = asyncio.create_task(here.feed(name))
    await trainer.wait_until_up(300)
    up = time.perf_counter() - started
    await feeding
    await here.until_head(head + 1)
    return up, time.perf_counter() - started


async def measure(directory: Path, jobs: int, fake_engine: bool) -> None:
    """Runs everything and prints the table."""
    shape = Shape(real_engine=not fake_engine, pause_s=0.0, trainer_settings={"LEASE_TTL_S": str(LEASE_TTL_S)})
    async with stage(directory / "run", make_model(directory / "model"), shape) as here:
        await trained(here, "warm-up")
        rows = [await trained(here, f"job-{n}") for n in range(jobs)]
        version = here.observer.read()[1].versions[-1]
        artifacts = here.deployment.store / "artifacts"
        weights, checkpoint = (artifacts / str(d) / "files" for d in (version.model_digest, version.checkpoint_digest))
        size = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
        copies = [plain_copy([weights], directory / "copy", synced=False) for _ in rows]
        synced = [plain_copy([weights, checkpoint], directory / "copy", synced=True) for _ in rows]
        returns = [await restarted(here, f"restart-{n}") for n in range(RESTARTS)]
        imports = [plain_import() for _ in range(RESTARTS)]
    step = median_phase(rows, ("train",))
    staged, commit = median_phase(rows, STAGING), median_phase(rows, ("commit",))
    publish, copy = median_phase(rows, ("publish",)), statistics.median(copies)
    durable = statistics.median(synced)
    answers, back = (statistics.median(times) for times in zip(*returns, strict=True))
    imported = statistics.median(imports)
    kind = "fake engine" if fake_engine else "SGLang"
    print(f"{jobs} jobs of {GROUPS} groups, weights of {size / 2**20:.0f} MiB, {kind}")
    print(f"step     {step:8.3f} s")
    print(f"stage    {staged:8.3f} s   {staged / step:6.2f} of the step, {staged / durable:.2f} of a synced copy")
    print(f"commit   {commit:8.3f} s   {commit / step:6.2f} of the step")
    print(f"publish  {publish:8.3f} s   {publish / copy:6.2f} of a plain copy ({copy:.3f} s)")
    print(f"answers  {answers:8.3f} s   after a SIGKILL, standing by")
    print(
        f"restart  {back:8.3f} s   {back / imported:6.2f} of a process that only imports ({imported:.2f} s); it does"
        " not wait for the lease of its predecessor in the run directory"
    )
    print(
        f"job_overhead: stage_and_commit={(staged + commit) / step:.2f} publish={publish / copy:.2f}"
        f" restart={back / imported:.2f}"
    )


def median_phase(rows: Sequence[Mapping[str, float]], phases: Sequence[str]) -> float:
    """Median over the jobs of the sum of some phases."""
    return statistics.median(sum(metrics[f"perf/{phase}_seconds"] for phase in phases) for metrics in rows)


def main() -> None:
    """Measures in a temporary directory."""
    parser = argparse.ArgumentParser(description="What a training job costs beside its step.")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--fake-engine", action="store_true", help="one that only hashes what it is told to load")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-benchmark-") as scratch:
        asyncio.run(measure(Path(scratch), arguments.jobs, arguments.fake_engine))


if __name__ == "__main__":
    main()
