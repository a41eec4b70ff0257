"""A model on this rank with all that it takes to run and train it: the actor, or the critic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.families.losses.vocab import VocabShard
from atoll.families.policy_spec import CriticSpec
from atoll.trainer.megatron.architecture import Architecture
from atoll.trainer.megatron.forward import ResponseModel
from atoll.trainer.megatron.groups import Membership
from atoll.trainer.megatron.hf_files import HfWeights
from atoll.trainer.megatron.model import build_model, padded_vocabulary
from atoll.trainer.megatron.optimizer import StepOptimizer, wrap_for_data_parallel
from atoll.trainer.megatron.parameters import load_weights
from atoll.trainer.megatron.settings import MegatronSettings
from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True)
class RankModel:
    """Built once; later loads overwrite what it holds."""

    architecture: Architecture
    padded_vocab: int
    shard: VocabShard
    module: GPTModel
    responses: ResponseModel
    optimizer: StepOptimizer

    @classmethod
    def build(
        cls,
        architecture: Architecture,
        settings: MegatronSettings,
        member: Membership,
        critic: CriticSpec | None = None,
    ) -> RankModel:
        """An actor, or with ``critic`` a critic, with arbitrary weights. A collective over all ranks."""
        module = build_model(architecture, settings, member.device, critic)
        wrapped = wrap_for_data_parallel(module)
        return cls(
            architecture=architecture,
            padded_vocab=padded_vocabulary(architecture, settings),
            shard=member.shard(architecture.vocab_size),
            module=module,
            responses=ResponseModel(wrapped),
            optimizer=StepOptimizer(wrapped, settings.optimizer),
        )

    def start_from(self, model_directory: Path) -> None:
        """The weights of a model directory and a fresh optimizer."""
        self.take_weights(model_directory)
        self.optimizer.reset()

    def take_weights(self, model_directory: Path) -> None:
        """The weights of a model directory; the optimizer keeps its moments."""
        load_weights(self.module, self.architecture, self.padded_vocab, HfWeights(model_directory).read)
