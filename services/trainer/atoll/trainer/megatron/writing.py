"""Files of a checkpoint or an export: what one rank cannot write, every rank learns before any of them raises.

A rank that raised alone would leave the others in their next collective, and the weights in memory would be lost with
the workers. So a rank notes what failed, goes on with the collectives, and all raise the same at the next `agree`.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from atoll.trainer.megatron.refusals import WriteFailed
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

_BACKEND, _FORMAT_VERSION = "torch_dist", 1


class Writing:
    """What this rank could not write. Example: ``with writing.attempt(p): p.write_bytes(...)``, then ``agree``."""

    def __init__(self) -> None:
        self._failure: tuple[int, str, str] | None = None
        """errno, message, path"""

    @contextmanager
    def attempt(self, path: Path) -> Iterator[None]:
        """A block that writes ``path``. An error of the filesystem ends the block and is kept for `agree`."""
        try:
            yield
        except Exception as error:
            self.note(error, path)

    def note(self, error: Exception, path: Path) -> None:
        """Keeps the first failure. Raises the error itself when the filesystem is not behind it."""
        cause = os_error_behind(error)
        if cause is None:
            raise error
        if self._failure is None:
            self._failure = cause.errno or 0, cause.strerror or str(cause), str(cause.filename or path)

    def agree(self) -> None:
        """Raises `WriteFailed` on every rank when any of them failed. A collective over all ranks."""
        every: list[tuple[int, str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._failure)
        failures = [each for each in every if each is not None]
        if failures:
            raise WriteFailed(*failures[0])


def os_error_behind(error: BaseException) -> OSError | None:
    """The filesystem's error that one of torch or safetensors stands for; None when there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        # Rust tells the number in words only.
        number = re.search(r"os error (\d+)|code: (\d+)", str(seen)) if isinstance(seen, SafetensorError) else None
        if number is not None:
            return OSError(int(number[1] or number[2]), str(seen))
        seen = seen.__cause__ or seen.__context__
    return None


def save_sharded(
    state: Mapping[str, object], directory: Path, writing: Writing, content_metadata: Mapping[str, object]
) -> None:
    """megatron-core's ``dist_checkpointing.save`` in the torch_dist format, with every rank's writes inside `writing`.

    ``directory`` must be there. Raises `WriteFailed` on every rank. A collective over all ranks.
    """
    sharded, common = save_preprocess({**state, "content_metadata": dict(content_metadata)})
    with writing.attempt(directory / "common.pt"):
        TorchCommonSaveStrategy("torch", _FORMAT_VERSION).save_common(common, directory)
    writing.agree()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    try:
        FullyParallelSaveStrategyWrapper(_NotedStrategy(writing), group).save(sharded, directory)
    except CheckpointException:  # on every rank
        writing.agree()
        raise
    if dist.get_rank() == 0:
        with writing.attempt(directory / "metadata.json"):
            save_config(CheckpointingConfig(_BACKEND, _FORMAT_VERSION), str(directory))
    writing.agree()


class _NotedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes this rank's shards in this process, where a failure still knows its cause."""

    def __init__(self, writing: Writing) -> None:
        super().__init__(_BACKEND, _FORMAT_VERSION, thread_count=1)
        self._writing = writing

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: object) -> AsyncRequest:
        finish = writer.finish

        def noted_finish(metadata: object, results: object) -> None:
            # Rank 0 alone, between two collectives.
            with self._writing.attempt(Path(writer.checkpoint_dir) / ".metadata"):
                finish(metadata, results)

        writer.finish = noted_finish
        request: AsyncRequest = super()._get_save_and_finalize_callbacks(writer, planned)
        if request.async_fn is None:
            return request
        transforms = request.async_fn.args[0]

        def write(_rank: int, buckets: Sequence[WriteBucket], results: queue.Queue[object]) -> None:
            results.put(self._write(transforms, buckets))

        return request._replace(async_fn=write)

    def _write(self, transforms: object, buckets: Sequence[WriteBucket]) -> object:
        """What megatron-core wants to hear: results by bucket, or an exception, of which it tells every rank."""
        written: dict[int, object] = {}
        for number, bucket in enumerate(buckets):
            answer: queue.Queue[tuple[int, object]] = queue.Queue()
            waiting: queue.Queue[int] = queue.Queue()
            waiting.put(number)
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answer, waiting, use_fsync=False)
            _, outcome = answer.get()
            if isinstance(outcome, Exception):
                self._writing.note(outcome, Path(bucket[0]))
                return RuntimeError(str(outcome))
            written[number] = outcome
        return written
