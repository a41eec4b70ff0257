"""The learning rate of every optimizer step of the actor: a pure function of how many came before it.

With s = steps taken + 1, a warm-up of W steps, and the end of the decay at step N:

```
rate(s) = peak s / W                                        s <= W
          peak                                              constant, s > W
          floor + (peak - floor) (1 - x)                    linear      x = min(1, (s - W) / (N - W))
          floor + (peak - floor) (1 + cos(pi x)) / 2        cosine      (arXiv 1608.03983, without restarts)
```

The first step has a rate above 0, step W has the peak, and from step N on it is the floor. How many steps were taken
is what the optimizer has counted: the count is in the checkpoint, so it comes back with a reload and with a rollback.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.common.errors import BadConfiguration
from atoll.trainer.settings import TrainerSettings


class RateCurve(StrEnum):
    """What the rate does after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class RateSchedule:
    """A schedule. Example: `RateSchedule(1e-5, RateCurve.COSINE, warmup_steps=10, decay_steps=1000, floor=1e-6)`."""

    peak: float
    curve: RateCurve = RateCurve.CONSTANT
    warmup_steps: int = 0
    """W"""
    decay_steps: int = 0
    """N, counted from the first step of all, the warm-up included; 0 for a constant rate."""
    floor: float = 0.0

    def rate(self, steps_taken: int) -> float:
        """The rate of the step that follows so many."""
        step = steps_taken + 1
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.curve is RateCurve.CONSTANT:
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1.0 - done if self.curve is RateCurve.LINEAR else (1.0 + math.cos(math.pi * done)) / 2
        return self.floor + (self.peak - self.floor) * left

    def rates(self, steps_taken: int, count: int) -> Sequence[float]:
        """The rates of the next `count` steps."""
        return [self.rate(steps_taken + number) for number in range(count)]


def rate_schedule(settings: TrainerSettings) -> RateSchedule:
    """The schedule of the settings. Raises BadConfiguration naming the variable, its value and what is allowed."""
    curve = RateCurve(settings.lr_schedule)
    decay, warmup, floor = settings.lr_decay_steps, settings.lr_warmup_steps, settings.lr_minimum
    if curve is RateCurve.CONSTANT:
        if decay is not None:
            raise _refused("LR_DECAY_STEPS", decay, "a constant rate has no decay; unset it or choose linear or cosine")
        if floor:
            raise _refused("LR_MINIMUM", floor, "a constant rate has no decay; unset it or choose linear or cosine")
        return RateSchedule(settings.learning_rate, warmup_steps=warmup)
    if decay is None:
        raise _refused("LR_DECAY_STEPS", "not set", f"{curve} needs it: the step at which the rate is at its minimum")
    if decay <= warmup:
        allowed = f"expected more than the {warmup} of ATOLL_TRAINER_LR_WARMUP_STEPS, which it includes"
        raise _refused("LR_DECAY_STEPS", decay, allowed)
    if floor > settings.learning_rate:
        allowed = f"expected at most the {settings.learning_rate:g} of ATOLL_TRAINER_LEARNING_RATE"
        raise _refused("LR_MINIMUM", f"{floor:g}", allowed)
    return RateSchedule(settings.learning_rate, curve, warmup, decay, floor)


def _refused(name: str, value: object, allowed: str) -> BadConfiguration:
    variable = f"ATOLL_TRAINER_{name}"
    return BadConfiguration(f"{variable} is {value}: {allowed}", field=variable)
