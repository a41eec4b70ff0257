"""Refusals before any worker is started, each naming the setting and the fix."""

import json
from pathlib import Path

from atoll.common.errors import AtollError, BadConfiguration
from atoll.families.catalog import AnyFamily, make_family
from atoll.families.run_settings import RunSettings
from atoll.trainer.backend import FamilyBinding
from atoll.trainer.backends import refuse_unsupported
from atoll.trainer.chain import ScenarioFacts
from atoll.trainer.schedule import rate_schedule
from atoll.trainer.settings import TrainerSettings

PREFIX = "ATOLL_TRAINER_"


def refuse_settings(settings: TrainerSettings) -> None:
    """Raises BadConfiguration for settings that cannot work whatever the registry says."""
    if not settings.engines:
        raise BadConfiguration(
            f"{PREFIX}ENGINES is empty: a version that nobody serves is of no use; give the engines' base URLs as a "
            'JSON list, e.g. ["http://127.0.0.1:30000"]',
            field=f"{PREFIX}ENGINES",
        )
    if len(set(settings.engines)) != len(settings.engines):
        raise BadConfiguration(f"{PREFIX}ENGINES names an engine twice", field=f"{PREFIX}ENGINES")
    if settings.min_engines > len(settings.engines):
        raise BadConfiguration(
            f"{PREFIX}MIN_ENGINES is {settings.min_engines}, expected at most the {len(settings.engines)} of "
            f"{PREFIX}ENGINES",
            field=f"{PREFIX}MIN_ENGINES",
        )
    rate_schedule(settings)
    try:
        settings.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfiguration(f"{PREFIX}RUN_DIR: {error}", field=f"{PREFIX}RUN_DIR") from error


def vocabulary_size(model_directory: Path) -> int:
    """V of a Hugging Face model directory. Raises BadConfiguration when its config.json does not say."""
    path = model_directory / "config.json"
    try:
        size = json.loads(path.read_text())["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise BadConfiguration(
            f"{path} gives no vocab_size ({error!r}); the trainer must share the registry's store"
        ) from error
    if not isinstance(size, int) or size < 1:
        raise BadConfiguration(f"{path}: vocab_size is {size!r}, expected a whole number of at least 1")
    return size


def run_settings(settings: TrainerSettings, facts: ScenarioFacts, vocab_size: int) -> RunSettings:
    """What families may know of this run."""
    return RunSettings(
        vocab_size=vocab_size,
        seq_length=settings.seq_length,
        tensor_parallel=settings.tensor_parallel,
        data_parallel=settings.data_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        context_parallel=settings.context_parallel,
        max_staleness=facts.max_staleness,
        learning_rate=settings.learning_rate,
        has_reference=True,
        score_centering=settings.score_centering,
        score_centering_top_k=settings.score_centering_top_k,
        score_centering_min_tail_mass=settings.score_centering_min_tail_mass,
    )


def resolve_bound_family(facts: ScenarioFacts, run: RunSettings) -> AnyFamily:
    """The scenario's family with its options, bound to this run.

    Raises BadConfiguration for a family that is not found, options it refuses, or a run it cannot be trained in.
    """
    source = f"scenario {facts.scenario}"
    try:
        family = make_family(facts.family, facts.options)
        family.validate_specific_args(run, source)
        refuse_unsupported(FamilyBinding(family.reference(), facts.options, run))
    except AtollError as error:
        raise BadConfiguration(f"{source}: {error.message}", field=error.field) from error
    return family.bind(run)
