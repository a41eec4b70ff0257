"""GET /atoll/status: what an operator looks at first."""

from dataclasses import asdict

from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.records import JsonObject
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.training_queue import TrainingQueue


async def status_reply(training: TrainingQueue, directory: ScenarioDirectory, engines: EnginePool) -> JsonObject:
    """Scenarios with their head, queue and last training error; those that cannot be used; what engines serve.

    Example: {"last_training_error": null, "scenarios": [{"scenario": "math", "head_number": 2, "weight_version": "1:2",
    "open_batches": 1, "pending_reports": 3, ...}], "failed_scenarios": [],
    "engines": [{"url": "http://...", "healthy": true, "weight_version": "1:2", "in_flight": 0, "problem": null, ...}]}
    """
    scenarios = (await training.status()).scenarios
    errors = [f"{scenario.scenario}: {scenario.last_error}" for scenario in scenarios if scenario.last_error]
    return {
        "last_training_error": "; ".join(errors) or None,
        "scenarios": [asdict(scenario) for scenario in scenarios],
        "failed_scenarios": [{"scenario": name, "problem": why} for name, why in sorted(directory.failed().items())],
        "engines": [{**asdict(engine), "problem": engine.problem or None} for engine in engines.engines],
    }
