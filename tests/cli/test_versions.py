"""The chain as a table and as JSON."""

from datetime import UTC, datetime
from io import StringIO

from atoll.api.registry.v1.version_pb2 import OPERATION_CREATION, OPERATION_TRAINING, Version
from atoll.cli.versions import version_as_json, versions_table
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console


def chain() -> list[Version]:
    """A trained version and its base, with the metrics that a trainer commits."""
    created = Timestamp()
    created.FromDatetime(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    base = Version(
        scenario="math",
        number=0,
        operation=OPERATION_CREATION,
        weight_version="1:0",
        model_digest="a" * 64,
        create_time=created,
    )
    trained = Version(
        scenario="math",
        number=1,
        parent=0,
        operation=OPERATION_TRAINING,
        weight_version="1:1",
        job_id="job-" + "1" * 32,
        model_digest="b" * 64,
        checkpoint_digest="c" * 64,
        consumed_sample_ids=["s-1", "s-2"],
        metrics={"reward/mean": 0.625, "train/loss": 1.0},
        create_time=created,
    )
    return [trained, base]


def rows(versions: list[Version]) -> list[list[str]]:
    console = Console(file=StringIO(), width=200)
    console.print(versions_table(versions))
    text = console.file
    assert isinstance(text, StringIO)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_version_is_a_row_with_its_parent_samples_and_reward() -> None:
    trained, base = rows(chain())
    assert trained == [
        "1:1",
        "0",
        "training",
        "b" * 12,
        "c" * 12,
        "2",
        "0.625",
        "job-111111111111",
        "2026-01-02 03:04:05",
    ]
    assert base == ["1:0", "-", "creation", "a" * 12, "-", "0", "-", "-", "2026-01-02 03:04:05"]


def test_json_keeps_the_names_of_the_contract() -> None:
    document = version_as_json(chain()[0])
    assert document["weight_version"] == "1:1" and document["metrics"] == {"reward/mean": 0.625, "train/loss": 1.0}
