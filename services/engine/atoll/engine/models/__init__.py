"""Makes small models on this machine, without a model hub: `python -m atoll.engine.models tiny|smollm2 --out DIR`."""

from atoll.engine.models.smollm2 import make_smollm2
from atoll.engine.models.tiny import Architecture, make_tiny

__all__ = ["Architecture", "make_smollm2", "make_tiny"]
