"""The pages about distillation and score centering name the metrics and settings that there are."""

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.run_settings import RunSettings
from atoll.families.sampler_heads import HEAD_COLUMNS, HEAD_IDS, HEAD_LOG_PROBS

from tests.fakes.tiny_actor import TinyActor
from tests.families.distill.test_objective import CASES, RUN, V, actor_of, rows_of

DOCS = Path(__file__).resolve().parents[3] / "docs"


def names_in(page: str, title: str) -> set[str]:
    """What stands in code marks in a section."""
    text = (DOCS / page).read_text()
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found
    return set(re.findall(r"`(\w+)`", found[1]))


def metrics_of(actor: TinyActor, run: RunSettings) -> set[str]:
    rows = list(actor.prepared(rows_of(actor.family)))
    heads = {HEAD_IDS: np.zeros((4, 2), np.int32), HEAD_LOG_PROBS: np.zeros((4, 2), np.float32)}
    if run.score_centering:
        rows = [
            replace(row, columns={**row.columns, **{key: head[: len(row.mask)] for key, head in heads.items()}})
            for row in rows
        ]
    batch = build_loss_batch(rows[:1], shard=VocabShard(V), columns=actor.family.run_columns(run))
    return set(LossFunction(actor.family, run)(batch, actor.model(rows[0].row)).metrics)


@pytest.mark.parametrize("name", ["sdft", "sdpo", "opd"])
def test_a_page_names_every_metric_of_the_loss(name: str) -> None:
    assert metrics_of(actor_of(*CASES[name]), RUN) <= names_in(f"families/{name}.md", "Metrics")


def test_the_page_of_score_centering_names_its_metrics_columns_and_settings() -> None:
    run = replace(RUN, score_centering=True, score_centering_top_k=2)
    metrics = {name for name in metrics_of(actor_of(*CASES["opd"]), run) if name.startswith("score_centering")}
    assert len(metrics) == 6
    assert metrics == names_in("score-centering.md", "Metrics") - {"loss"}
    settings = names_in("score-centering.md", "Settings")
    assert {spec.name for spec in HEAD_COLUMNS} <= settings
    defaults = {field.name: field.default for field in fields(RunSettings) if field.name.startswith("score_centering")}
    text = (DOCS / "score-centering.md").read_text()
    for name, default in defaults.items():
        assert f"| `{name}` | `{str(default).lower()}` |" in text
