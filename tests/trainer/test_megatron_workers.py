"""The backend with workers of its own: crashes, restarts, and families that live outside this repository."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from atoll.common.errors import AtollError
from atoll.families.run_settings import RunSettings
from atoll.trainer.backend import BackendCrashed, FamilyBinding
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import MegatronSettings, ParallelLayout
from atoll.trainer.workers.group import WorkerPlan
from atoll.trainer.workers.local import LocalWorkerGroup

from tests.trainer.megatron_support import VOCAB, ModelKind, grpo_binding, grpo_steps, make_rows

TinyModel = Callable[[ModelKind], Path]

_SPEC = """
from atoll.families.family import AdvantageSource, HookChannel, LossFamily, LossType
from atoll.families.signal import StepSignal

class PushDown(LossFamily):
    name = "pushdown"
    loss_type = LossType.CUSTOM_LOSS
    advantages = AdvantageSource.FORBIDDEN
    required_objective_hooks = frozenset({HookChannel.LOSS})

    @property
    def batching(self):
        raise NotImplementedError

    def prepare(self, batch, state):
        return StepSignal(None)

"""
_OBJECTIVE = """
from atoll.families.family import HookChannel
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.vocab import log_probs_at_ids

@objective_hook(HookChannel.LOSS)
def pushdown_loss(args, batch, logits, reduce):
    log_probs = log_probs_at_ids(logits, batch.tokens, batch.temperatures, batch.shard)
    return reduce(log_probs), {"likelihood": reduce.metric(log_probs)}
"""


class Watched:
    """Launches local groups and remembers them."""

    def __init__(self) -> None:
        self.groups: list[LocalWorkerGroup] = []

    def __call__(self, plan: WorkerPlan) -> LocalWorkerGroup:
        self.groups.append(LocalWorkerGroup(plan))
        return self.groups[-1]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A family package that only `sys.path` knows; workers take the path over when they start."""
    root = tmp_path_factory.mktemp("elsewhere")
    (root / "pushdown_pkg").mkdir()
    (root / "pushdown_pkg" / "__init__.py").touch()
    (root / "pushdown_pkg" / "spec.py").write_text(_SPEC)
    (root / "pushdown_pkg" / "objective.py").write_text(_OBJECTIVE)
    (root / "unhooked_pkg").mkdir()
    (root / "unhooked_pkg" / "__init__.py").touch()
    (root / "unhooked_pkg" / "spec.py").write_text(_SPEC.replace('"pushdown"', '"unhooked"'))
    sys.path.insert(0, str(root))
    yield "pushdown_pkg.spec:PushDown"
    sys.path.remove(str(root))


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def backend(package: str, watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronBackend]:
    settings = MegatronSettings(ParallelLayout(data=2))
    backend = MegatronBackend(settings, watched, tmp_path_factory.mktemp("logs"))
    yield backend
    backend.close()


def test_kill_9_of_a_rank_in_mid_step_is_reported_in_seconds_and_a_load_starts_again(
    backend: MegatronBackend, watched: Watched, tiny_model: TinyModel
) -> None:
    model = tiny_model(ModelKind("qwen3"))
    backend.load(model, None, None)
    binding = grpo_binding()
    steps = grpo_steps(make_rows(), binding)
    expected = backend.train(binding, steps, [1e-3]).metrics
    pids = watched.groups[-1].pids()
    children = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    with pytest.raises(BackendCrashed) as crashed:
        backend.train(binding, steps * 10_000, [1e-9] * 10_000)
    assert time.monotonic() - killed_at[0] < 10
    assert crashed.value.rank == 1
    assert crashed.value.what == "was ended by signal SIGKILL"
    assert not backend.healthy()
    assert children
    assert not any(psutil.pid_exists(pid) for pid in [*pids, *children] if not _zombie(pid))

    backend.load(model, None, None)
    assert backend.healthy()
    assert backend.train(binding, steps, [1e-3]).metrics == expected


def _zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_family_of_another_package_trains(package: str, backend: MegatronBackend, tiny_model: TinyModel) -> None:
    backend.load(tiny_model(ModelKind("llama")), None, None)
    binding = FamilyBinding(package, {}, RunSettings(VOCAB, 64))
    steps = grpo_steps(make_rows(), binding)
    found = [backend.train(binding, steps, [1e-2]).metrics[0]["likelihood"] for _ in range(3)]
    assert found[2] < found[1] < found[0]


def test_staging_without_room_is_refused_before_anything_is_written(
    backend: MegatronBackend, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.load(tiny_model(ModelKind("llama")), None, None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(OSError, match="bytes are needed and 100000 are free"):
        backend.stage(tmp_path / "export", tmp_path / "checkpoint", b"")
    assert list(tmp_path.iterdir()) == []
    assert backend.healthy()


def test_families_that_cannot_run_here_are_refused_without_touching_the_workers(
    package: str, backend: MegatronBackend, tiny_model: TinyModel
) -> None:
    backend.load(tiny_model(ModelKind("llama")), None, None)
    steps = grpo_steps(make_rows(), grpo_binding())
    run = RunSettings(VOCAB, 64)
    for binding, reason in [
        (FamilyBinding("nowhere.at_all:Family", {}, run), "nowhere"),
        (FamilyBinding("grpo", {"eps_clipp": 0.1}, run), "eps_clipp"),
        (grpo_binding(kl_loss_coef=0.1), "reference model"),
    ]:
        with pytest.raises(AtollError, match=reason):
            backend.train(binding, steps, [1e-2])
    assert backend.healthy()


def test_a_family_whose_hooks_are_missing_stops_the_workers(
    package: str, backend: MegatronBackend, tiny_model: TinyModel
) -> None:
    backend.load(tiny_model(ModelKind("llama")), None, None)
    binding = FamilyBinding("unhooked_pkg.spec:PushDown", {}, RunSettings(VOCAB, 64))
    with pytest.raises(BackendCrashed, match="objective, which is missing"):
        backend.train(binding, grpo_steps(make_rows(), grpo_binding()), [1e-2])
