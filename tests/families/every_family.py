"""A step of every bundled family that has a loss or a primitive of its own and is not a distillation."""

import numpy as np
from atoll.families.catalog import make_family
from atoll.families.openclawrl.spec import (
    HINT_LENGTHS,
    HINT_OVERLAP,
    HINT_TOKENS,
    SAMPLER_IDS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
)
from atoll.families.rows import Column, Row
from atoll.families.sao.row import ACTION_MASK

from tests.families.family_steps import FamilyStep, V, make_step

RATIOS = (1.0, 1.4, 0.5, 6.5, 5.9, 0.71, 0.2, 3.0)
ADVANTAGES = (1.0, 5.0, -1.0, 2.0, -2.0, 1.5, 1.0, -1.0)
NAMES = ("openclawrl", "sao", "sft", "tttd")


def lesson(number: int, row: Row) -> dict[str, Column]:
    """Ids of both shards; -1 among them."""
    length = row.response_length
    ids = np.arange(number, number + 3 * length, dtype=np.int32).reshape(length, 3) * 5 % V
    ids[0, 2] = -1
    return {
        SAMPLER_IDS: ids,
        HINT_TOKENS: np.zeros(0, dtype=np.int32),
        HINT_LENGTHS: np.zeros(0, dtype=np.int32),
        TEACHER_IDS: ids,
        TEACHER_LOG_PROBS: np.linspace(-3, -1, 3 * length, dtype=np.float32).reshape(length, 3),
        HINT_OVERLAP: np.ones(length, dtype=np.float32),
    }


def step_of(name: str) -> FamilyStep:
    match name:
        case "openclawrl":
            family = make_family(name, {"top_k": 3, "entropy_coef": 0.1})
            return make_step(family, advantages=ADVANTAGES, columns=lesson)
        case "sao":
            return make_step(
                make_family(name, {"eps_clip_high": 5.0}),
                ratios=RATIOS,
                advantages=ADVANTAGES,
                columns=lambda _, row: {ACTION_MASK: np.ones(row.response_length, dtype=np.uint8)},
            )
        case "sft":
            return make_step(make_family(name, {}))
        case _:
            return make_step(make_family(name, {}), ratios=RATIOS, advantages=ADVANTAGES)
