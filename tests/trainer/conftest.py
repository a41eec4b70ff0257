"""One pool of Megatron workers for each layout of a session, and tiny models by kind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.megatron_support import ModelKind, Pool, save_tiny_model


@pytest.fixture(scope="session")
def megatron_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("megatron-logs"), {})
    yield pool
    for shared in pool.groups.values():
        shared.group.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelKind], Path]:
    made: dict[ModelKind, Path] = {}

    def make(kind: ModelKind) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("model") / "model"
            save_tiny_model(kind, made[kind])
        return made[kind]

    return make
