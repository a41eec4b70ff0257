"""Whether a real engine sampled under the version that is recorded: its log-probs against those of its weights."""

from pathlib import Path

import numpy as np
from transformers.utils.logging import disable_progress_bar

from tests.chaos.databases import GatewayState, RegistryState
from tests.forward import log_probs_of

CHECKED = 40
"""Samples, the newest first: older versions may have lost their bytes."""
TOLERANCE = 1e-3
"""Versions of a random tiny model trained with a rate of 1e-3 differ by more."""


def wrong_log_probs(gateway: GatewayState, registry: RegistryState, store: Path) -> list[str]:
    """Samples whose recorded log-probs are not those of the version that each span names."""
    disable_progress_bar()
    wrong: list[str] = []
    checked = 0
    for sample in reversed(list(gateway.samples.values())):
        for start, end, name in sample.spans:
            digest = registry.by_weight_version[name].model_digest
            if digest in registry.removed or start == end:
                continue
            model = store / "artifacts" / digest / "files"
            expected = log_probs_of(model, sample.prompt, sample.response, temperature=1.0)[start:end]
            apart = float(np.abs(expected - np.asarray(sample.log_probs[start:end])).max())
            checked += 1
            if apart > TOLERANCE:
                wrong.append(f"sample {sample.receipt} says {name}, its log-probs are {apart:.2g} from that version's")
        if checked >= CHECKED:
            break
    return wrong if checked else ["no sample was left whose version still has bytes"]
