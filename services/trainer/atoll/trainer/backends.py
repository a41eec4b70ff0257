"""The one place that knows which training backends there are."""

from collections.abc import Callable
from functools import partial

from atoll.trainer.backend import FamilyBinding, TrainingBackend
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.workers.group import WorkerGroup, WorkerPlan


def make_backend(settings: TrainerSettings) -> TrainingBackend:
    """The backend that the settings choose; nothing is started yet."""
    match settings.backend:
        case "megatron":
            return _megatron(settings)


def refuse_unsupported(binding: FamilyBinding) -> None:
    """Raises InvalidInput, naming what it asks for, for a family that the backend does not run. Starts nothing."""
    from atoll.trainer.megatron.family_check import check_family

    check_family(binding, has_reference=binding.run.has_reference)


def layout_of(settings: TrainerSettings) -> str:
    """How the workers share the model, e.g. "tp2 dp1"; pipeline and context where there is more than one rank."""
    parts = [f"tp{settings.tensor_parallel}"]
    parts += [f"pp{settings.pipeline_parallel}"] if settings.pipeline_parallel > 1 else []
    parts += [f"cp{settings.context_parallel}"] if settings.context_parallel > 1 else []
    return " ".join([*parts, f"dp{settings.data_parallel}"])


def launcher_of(settings: TrainerSettings) -> Callable[[WorkerPlan], WorkerGroup]:
    """What makes worker groups of plans, as the settings choose. Ray is imported only here."""
    match settings.workers:
        case "local":
            from atoll.trainer.workers.local import LocalWorkerGroup

            return LocalWorkerGroup
        case "ray":
            from atoll.trainer.workers.ray_loopback import prefer_loopback

            if settings.ray_address is None:
                prefer_loopback()
            from atoll.trainer.workers.ray_bridge import Bridge
            from atoll.trainer.workers.ray_group import RayWorkerGroup

            bridge = Bridge(settings.ray_actor_name, settings.scenario, f"{settings.host}:{settings.port}")
            address, namespace = settings.ray_address, settings.ray_namespace
            return partial(RayWorkerGroup, address=address, namespace=namespace, bridge=bridge)


def _megatron(settings: TrainerSettings) -> TrainingBackend:
    # Imported when chosen: another backend must work where this one is not installed.
    from atoll.trainer.megatron.backend import MegatronBackend, Timeouts
    from atoll.trainer.megatron.settings import AdamW, MegatronSettings, MicroBatchLimit, ParallelLayout

    megatron = MegatronSettings(
        layout=ParallelLayout(
            tensor=settings.tensor_parallel,
            data=settings.data_parallel,
            pipeline=settings.pipeline_parallel,
            context=settings.context_parallel,
        ),
        micro_batch=MicroBatchLimit(tokens=settings.micro_batch_tokens),
        optimizer=AdamW(
            beta1=settings.adam_beta1,
            beta2=settings.adam_beta2,
            epsilon=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
        ),
        seed=settings.seed,
    )
    timeouts = Timeouts(step=settings.step_timeout_s)
    return MegatronBackend(megatron, launcher_of(settings), settings.run_dir / "workers", timeouts)
