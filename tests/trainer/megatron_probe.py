"""A rank that also shows its gradients; workers import it by name."""

import resource
import signal

import numpy as np
import numpy.typing as npt
from atoll.trainer.megatron.parameters import gather_weights
from atoll.trainer.megatron.rank import MegatronRank
from torch import Tensor


class ProbedRank(MegatronRank):
    """A `MegatronRank` whose last step can be looked at."""

    def gradients(self) -> dict[str, npt.NDArray[np.float32]]:
        """Whole gradients of the last step, after clipping, by Hugging Face name."""
        model = self._loaded()
        return {name: grad.numpy() for name, grad in gather_weights(model.module, model.architecture, _main_grad)}

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Whole weights, by Hugging Face name."""
        model = self._loaded()
        return {name: weight.numpy().copy() for name, weight in gather_weights(model.module, model.architecture)}

    def kept(self, name: str) -> dict[str, npt.NDArray[np.float32]]:
        """Whole weights of a kept set, by Hugging Face name."""
        model = self._loaded()
        with self._sets.in_place(name, model):
            return self.weights()

    def critic_head(self) -> npt.NDArray[np.float32]:
        """Weight and bias of the critic's value head; empty on a stage before the last."""
        critic = self._critic
        if critic is None or not critic.module.post_process:
            return np.zeros(0, dtype=np.float32)
        head = critic.module.output_layer
        return np.concatenate([head.weight.detach().numpy().ravel(), head.bias.detach().numpy()])

    def critic_gradients(self) -> dict[str, npt.NDArray[np.float32]]:
        """As `gradients`, of the critic's last step, without its value head."""
        critic = self._critic
        assert critic is not None
        return {name: grad.numpy() for name, grad in gather_weights(critic.module, critic.architecture, _main_grad)}

    def limit_files(self, size: int | None) -> None:
        """From here on no file of this rank may grow beyond so many bytes; None: any size."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def _main_grad(parameter: Tensor) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient
