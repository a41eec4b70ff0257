from atoll.registry.app import Registry
from atoll.registry.types import Kind

from tests.registry.material import SCENARIO, content, seal


def test_old_versions_lose_their_bytes_and_keep_their_entry(registry: Registry) -> None:
    committed = []
    for parent in range(4):
        model = seal(registry, b"model %d" % parent)
        checkpoint = seal(registry, b"checkpoint %d" % parent, Kind.CHECKPOINT)
        committed.append(registry.chain.commit(content(parent, model.digest, checkpoint_digest=checkpoint.digest)))
    old = {d for version in committed[:2] for d in (version.content.model_digest, version.content.checkpoint_digest)}
    assert set(registry.sweeper.sweep()) == old
    store = registry.artifacts.store
    base = registry.chain.get(SCENARIO, number=0).content.model_digest
    kept = {d for v in committed[2:] for d in (v.content.model_digest, v.content.checkpoint_digest)} | {base}
    assert {path.name for path in store.artifacts.iterdir()} == kept
    assert not any(store.trash.iterdir())
    assert {a.digest for a in registry.artifacts.list_page(None, 100, None).artifacts if a.removed_at} == old
    assert [version.content for version in registry.chain.since(SCENARIO, 1, 10)] == [v.content for v in committed]
    assert registry.sweeper.sweep() == ()


def test_an_open_read_outlives_the_removal(registry: Registry) -> None:
    first = seal(registry, b"first")
    registry.chain.commit(content(0, first.digest))
    with registry.artifacts.open_file(first.digest, "weights.bin", 0) as stream:
        for parent in (1, 2, 3):
            registry.chain.commit(content(parent, seal(registry, bytes([parent])).digest))
        assert registry.sweeper.sweep()
        assert stream.read() == b"first"


def test_sealing_removed_content_again_brings_it_back(registry: Registry) -> None:
    first = seal(registry, b"first")
    registry.chain.commit(content(0, first.digest))
    for parent in (1, 2, 3):
        registry.chain.commit(content(parent, seal(registry, bytes([parent])).digest))
    registry.sweeper.sweep()
    again = seal(registry, b"first")
    assert (again.digest, again.files) == (first.digest, first.files)
    assert registry.artifacts.get(first.digest).removed_at is None
    assert (registry.artifacts.store.files_of(first.digest) / "weights.bin").read_bytes() == b"first"
