"""Hooks that use all that an actor offers."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from atoll.families.family import HookChannel
from atoll.families.losses.actor import CURRENT_WEIGHTS, Actor, RolloutData
from atoll.families.losses.batch import LossBatch
from atoll.families.losses.hooks import objective_hook
from atoll.families.losses.reducer import Reducer
from atoll.families.losses.vocab import log_probs_at_ids
from atoll.families.run_settings import HookArgs
from torch import Tensor

from tests.trainer.taught.spec import FIRST, OTHER, SLOW, TaughtOptions


@objective_hook(HookChannel.ACTOR_INIT)
def taught_actor_init(actor: Actor) -> None:
    for name in ("first", "slow"):
        if not actor.has_weights(name):
            actor.keep_weights(name)


@objective_hook(HookChannel.ACTOR_PRE_TRAIN)
def taught_actor_pre_train(actor: Actor, rollout_data: RolloutData) -> None:
    options = actor.args.options
    assert isinstance(options, TaughtOptions)
    sources = {FIRST: "first", SLOW: "slow", OTHER: CURRENT_WEIGHTS}
    if options.other_model is not None:
        actor.keep_checkpoint_weights("other", options.other_model)
        sources[OTHER] = "other"
    rows = list(rollout_data.rows)
    for column, weights in sources.items():
        for number, found in enumerate(actor.forward_rows(weights, rows, _read)):
            if found:
                assert found["low"].dtype == torch.float16 and found["same"].dtype == torch.bool
                assert bool(found["same"].all()) and found["low"].shape == (rows[number].row.response_length, 2)
                columns = {**rows[number].columns, column: found["log_probs"].numpy()}
                rows[number] = replace(rows[number], columns=columns)
    rollout_data.rows = rows
    actor.update_moving_average("slow", options.rate)


def _read(batch: LossBatch, logits: Tensor) -> Mapping[str, Tensor]:
    assert not logits.requires_grad
    log_probs = log_probs_at_ids(logits, batch.tokens, batch.temperatures, batch.shard)
    return {"log_probs": log_probs, "low": log_probs[:, None].repeat(1, 2).half(), "same": log_probs == log_probs}


@objective_hook(HookChannel.LOSS)
def taught_loss(
    args: HookArgs[TaughtOptions], batch: LossBatch, logits: Tensor, reduce: Reducer
) -> tuple[Tensor, Mapping[str, Tensor]]:
    log_probs = log_probs_at_ids(logits, batch.tokens, batch.temperatures, batch.shard)
    empty = batch.rollout_log_probs.new_zeros(0)
    said = {name: batch.columns[name] if batch.sample_ids else empty for name in (FIRST, SLOW, OTHER)}
    loss = reduce((log_probs - said[OTHER] + 1).square())
    return loss, {"student": reduce.metric(log_probs), **{name: reduce.metric(value) for name, value in said.items()}}
