"""The command line and environment of SGLang for a device."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from atoll.engine.preflight import ModelFacts
from atoll.engine.settings import Device, EngineSettings

SHIMS = Path(__file__).parent / "shims"


def sglang_arguments(
    settings: EngineSettings, device: Device, model_path: Path, weight_version: str, facts: ModelFacts
) -> list[str]:
    """The program and its arguments; ATOLL_ENGINE_EXTRA_ARGS come last and win."""
    arguments = [sys.executable, "-m", "sglang.launch_server"]
    flags: dict[str, object] = {
        "--model-path": model_path,
        "--host": settings.host,
        "--port": settings.port,
        "--weight-version": weight_version,
        "--log-level-http": "warning",
    }
    # Without it every frame of a stream repeats the whole reply: 43 MB for 1,500 tokens with top-k instead of 0.6.
    switches = ["--incremental-streaming-output"]
    if settings.context_length is not None:
        flags["--context-length"] = settings.context_length
    if device is Device.CPU:
        flags |= {
            "--context-length": settings.context_length or min(facts.context_length, settings.max_total_tokens),
            "--device": "cpu",
            # In bfloat16 the recorded log-probs are up to 0.1 nats away from what a trainer computes.
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "xgrammar",
            "--cuda-graph-backend-decode": "disabled",
            "--cuda-graph-backend-prefill": "disabled",
            # Its default fills the memory of the machine.
            "--max-total-tokens": settings.max_total_tokens,
            # Weights and cache together may take this share of what is free at start. The line above is the real bound;
            # a small share makes an engine give up when its neighbours take memory while it loads.
            "--mem-fraction-static": 0.8,
            "--max-running-requests": settings.max_running_requests,
        }
        # An idle scheduler would spin on one of the cores that the trainer beside it computes on.
        switches += ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"]
    for name, value in flags.items():
        arguments += [name, str(value)]
    return [*arguments, *switches, *shlex.split(settings.extra_args)]


def sglang_environment(
    settings: EngineSettings, device: Device, inherited: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """What SGLang's processes get: the caller's environment without our secrets, and what the device needs.

    scratch: a directory of this start alone, for as long as SGLang runs.
    """
    environment = {name: value for name, value in inherited.items() if not name.startswith("ATOLL_")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The log-probs are those of the distribution at the request's temperature, not at temperature 1.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    if "--dist-init-addr" not in settings.extra_args:
        # Ranks of one machine meet in a file: torch's store at a port listens on every address and asks for no token.
        environment.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{scratch / 'rendezvous'}")
    if device is Device.CPU:
        search_path = [str(SHIMS), *filter(None, [inherited.get("PYTHONPATH")])]
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # Ten times faster than the default of a thread per core: small matrices drown in synchronization.
            "OMP_NUM_THREADS": str(settings.threads),
            "PYTHONPATH": os.pathsep.join(search_path),
        }
    return environment
