from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from atoll.common.errors import BadConfiguration, NotFound
from atoll.registry import durable
from atoll.registry.app import Registry
from atoll.registry.settings import RegistrySettings
from atoll.registry.types import Kind, Operation, utc_now

from tests.registry.material import SCENARIO, content, seal, write_files
from tests.registry.test_restoring import commit, restoring


def execute(registry: Registry, statement: str, **values: object) -> None:
    with registry.database.write() as connection:
        connection.execute(sa.text(statement), values)


def mark_removed(registry: Registry, digest: str, then: int) -> None:
    execute(registry, "UPDATE artifacts SET removed_at = :then WHERE digest = :digest", then=then, digest=digest)


def microseconds_ago(hours: int) -> int:
    return int((utc_now() - timedelta(hours=hours)).timestamp() * 1e6)


def test_sealed_bytes_without_a_row_are_adopted(registry: Registry, settings: RegistrySettings) -> None:
    artifact = seal(registry, b"model")
    execute(registry, "DELETE FROM artifact_files WHERE digest = :digest", digest=artifact.digest)
    execute(registry, "DELETE FROM artifacts WHERE digest = :digest", digest=artifact.digest)
    assert Registry(settings).artifacts.get(artifact.digest) == artifact


def test_sealed_bytes_without_a_row_that_do_not_verify_are_removed(
    registry: Registry, settings: RegistrySettings
) -> None:
    artifact = seal(registry, b"model")
    execute(registry, "DELETE FROM artifact_files WHERE digest = :digest", digest=artifact.digest)
    execute(registry, "DELETE FROM artifacts WHERE digest = :digest", digest=artifact.digest)
    path = registry.artifacts.store.files_of(artifact.digest) / "weights.bin"
    path.chmod(0o600)
    path.write_bytes(b"MODEL")
    with pytest.raises(NotFound):
        Registry(settings).artifacts.get(artifact.digest)
    assert not (registry.artifacts.store.artifacts / artifact.digest).exists()


def test_a_removal_that_stopped_after_its_row_is_finished(registry: Registry, settings: RegistrySettings) -> None:
    artifact = seal(registry, b"model")
    mark_removed(registry, artifact.digest, microseconds_ago(-1))
    with pytest.raises(NotFound, match="retention removed it"):
        Registry(settings).artifacts.get(artifact.digest)
    assert not (registry.artifacts.store.artifacts / artifact.digest).exists()


def test_a_seal_of_removed_content_that_stopped_before_its_row_is_finished(
    registry: Registry, settings: RegistrySettings
) -> None:
    artifact = seal(registry, b"model")
    mark_removed(registry, artifact.digest, microseconds_ago(2))
    assert Registry(settings).artifacts.get(artifact.digest) == artifact


def test_staging_areas_of_dead_writers_wait_for_them(registry: Registry, settings: RegistrySettings) -> None:
    files = write_files(registry.artifacts.store.stage("one", Kind.MODEL), {"a": b"a"})
    assert Registry(settings).artifacts.seal("one", files)


def test_unfinished_staging_areas_and_trash_are_cleaned_up(registry: Registry, settings: RegistrySettings) -> None:
    store = registry.artifacts.store
    write_files(store.staging / ".new-1234", {"files/x": b""})
    write_files(store.trash / "1234", {"files/x": b""})
    durable.make_read_only(store.trash / "1234")
    Registry(settings)
    assert not any(store.staging.iterdir())
    assert not any(store.trash.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "artifacts/notes.txt",
        "artifacts/" + "f" * 64,
        "staging/notes.txt",
        "staging/One/manifest.json",
        "artifacts/{digest}/notes.txt",
        "artifacts/{digest}/files/notes.txt",
        "artifacts/{digest}/files/deep/notes.txt",
    ],
)
def test_files_that_atoll_did_not_write_block_the_start_and_stay(
    registry: Registry, settings: RegistrySettings, name: str
) -> None:
    digest = registry.chain.get(SCENARIO).content.model_digest
    store = registry.artifacts.store
    path = store.root / name.format(digest=digest)
    for folder in (store.artifacts / digest, store.files_of(digest)):
        folder.chmod(0o755)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(BadConfiguration, match=r"holds what Atoll did not write.*nothing was deleted") as refused:
        Registry(settings)
    shown = name.format(digest=digest).removesuffix("/manifest.json")
    assert shown in refused.value.message
    assert path.read_text() == "mine"


@pytest.mark.parametrize("settings", ["sqlite"], indirect=True)
def test_a_database_elsewhere_or_a_lost_and_found_is_no_stranger(tmp_path: Path, settings: RegistrySettings) -> None:
    (settings.store / "lost+found").mkdir()
    (settings.store / "registry.db").rename(settings.store / "chain.sqlite")
    moved = settings.model_copy(update={"database_url": f"sqlite:///{settings.store / 'chain.sqlite'}"})
    assert Registry(moved).scenarios.get(SCENARIO).head == 0


def test_a_head_whose_model_is_lost_blocks_the_start_when_nothing_is_left_to_restore(
    registry: Registry, settings: RegistrySettings
) -> None:
    digest = registry.chain.get(SCENARIO).content.model_digest
    durable.remove_tree(registry.artifacts.store.artifacts / digest)
    for _ in range(2):  # nothing is marked by the refusal
        with pytest.raises(
            BadConfiguration, match=f"no version that could be restored is left: version 0 of support: {digest}"
        ):
            Registry(settings)


def test_a_head_whose_model_is_lost_starts_while_a_durable_version_is_whole(
    registry: Registry, settings: RegistrySettings
) -> None:
    one, live = commit(registry, 0), commit(registry, 1, live=True)
    store = registry.artifacts.store
    durable.remove_tree(store.artifacts / live.content.model_digest)
    reopened = Registry(settings)
    with pytest.raises(NotFound):
        reopened.artifacts.get(live.content.model_digest)
    recovered = reopened.chain.commit(restoring(Operation.RECOVERY, live, one))
    assert (recovered.content.model_digest, str(recovered.weight_version)) == (one.content.model_digest, "2:3")
    reopened.close()


def test_a_lost_checkpoint_of_a_durable_head_leaves_the_one_before(
    registry: Registry, settings: RegistrySettings
) -> None:
    one, two = commit(registry, 0), commit(registry, 1)
    for digest in two.content.model_digest, two.content.checkpoint_digest:
        assert digest is not None
        durable.remove_tree(registry.artifacts.store.artifacts / digest)
    reopened = Registry(settings)
    assert reopened.sweeper.sweep() == ()
    assert reopened.chain.commit(restoring(Operation.RECOVERY, two, one)).content.restores == 1
    reopened.close()


def test_a_head_that_lost_everything_but_its_base_model_goes_back_to_it(
    registry: Registry, settings: RegistrySettings
) -> None:
    one, zero = commit(registry, 0), registry.chain.get(SCENARIO, number=0)
    for digest in one.content.model_digest, one.content.checkpoint_digest:
        assert digest is not None
        durable.remove_tree(registry.artifacts.store.artifacts / digest)
    reopened = Registry(settings)
    recovered = reopened.chain.commit(restoring(Operation.RECOVERY, one, zero))
    assert (recovered.content.model_digest, recovered.content.restores) == (zero.content.model_digest, 0)
    durable.remove_tree(registry.artifacts.store.artifacts / zero.content.model_digest)
    with pytest.raises(BadConfiguration, match="version 2 of support"):
        Registry(settings)
    reopened.close()


def test_other_lost_bytes_are_marked_removed(registry: Registry, settings: RegistrySettings) -> None:
    first, second = seal(registry, b"first"), seal(registry, b"second")
    registry.chain.commit(content(0, first.digest))
    registry.chain.commit(content(1, second.digest))
    durable.remove_tree(registry.artifacts.store.artifacts / first.digest)
    reopened = Registry(settings)
    with pytest.raises(NotFound):
        reopened.artifacts.get(first.digest)
    assert reopened.chain.get(SCENARIO).content.model_digest == second.digest


@pytest.mark.parametrize("settings", ["sqlite"], indirect=True)
def test_a_store_without_its_database_is_taken_in_again(registry: Registry, settings: RegistrySettings) -> None:
    artifact = seal(registry, b"model")
    registry.close()
    for name in ("registry.db", "registry.db-wal", "registry.db-shm"):
        (settings.store / name).unlink(missing_ok=True)
    assert Registry(settings).artifacts.get(artifact.digest) == artifact
