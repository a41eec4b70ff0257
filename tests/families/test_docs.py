"""The pages about families say what the code does, and the example of "write your own family" trains."""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from atoll.families.catalog import BUNDLED, AnyFamily, make_family, resolve_family
from atoll.families.losses.batch import build_loss_batch
from atoll.families.losses.loss_function import LossFunction
from atoll.families.losses.vocab import VocabShard
from atoll.families.steps import build_train_steps

from tests.families.every_family import NAMES, step_of
from tests.families.family_steps import RUN, V, answer, make_step
from tests.families.rows import make_batch, make_row

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page.stem for page in (DOCS / "families").glob("*.md"))


def page(name: str) -> str:
    return (DOCS / "families" / f"{name}.md").read_text()


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def test_every_family_of_atoll_has_a_page() -> None:
    assert set(PAGES) == set(BUNDLED)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_lists_every_option_with_its_default(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .*\|$", section(page(name), "Options"), re.MULTILINE)
    fields = resolve_family(name).Options.model_fields
    assert [option for option, _ in rows] == list(dict.fromkeys(option for option, _ in rows))
    expected = {
        option: "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        for option, field in fields.items()
    }
    assert dict(rows) == expected


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_is_reported_and_where_the_family_comes_from(name: str) -> None:
    text = page(name)
    assert text.startswith(f"# {name}\n")
    assert "Source: " in text
    for block in re.findall(r"```json\n(.*?)```", section(text, "Report"), re.DOTALL):
        assert json.loads(block)["receipts"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_every_metric_of_the_loss(name: str) -> None:
    named = set(re.findall(r"`([\w/]+)`", section(page(name), "Metrics")))
    missing = set(step_of(name).answer().metrics) - named
    assert not missing


@pytest.fixture
def thumbs(tmp_path: Path) -> Iterator[AnyFamily]:
    """The family of the example, written to a package as the page says."""
    text = (DOCS / "write-your-own-family.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        path = re.match(r"# (\S+\.py)\n", block)
        assert path
        file = tmp_path / path[1]
        file.parent.mkdir(exist_ok=True)
        file.write_text(block)
    (tmp_path / "my_pkg" / "__init__.py").write_text("")
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    scenario = yaml.safe_load(settings)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    try:
        yield make_family(scenario["family"], scenario["options"])
    finally:
        sys.path.remove(str(tmp_path))


def test_the_example_family_trains(thumbs: AnyFamily) -> None:
    batch = make_batch(make_row("good", reward=1.0), make_row("bad", reward=-1.0))
    assert thumbs.batching.form([]) == []
    signal = thumbs.prepare(batch, {})
    assert signal.metrics == {"thumbs_up": 0.5}
    (step,) = build_train_steps(thumbs, batch, signal)
    logits = torch.zeros(6, V, requires_grad=True)
    function = LossFunction(thumbs, RUN)
    for _ in range(10):
        logits.grad = None
        result = function(build_loss_batch(step.rows, shard=VocabShard(V)), logits)
        assert not result.bad_rows.any()
        torch.autograd.backward(result.loss)
        assert logits.grad is not None
        with torch.no_grad():
            logits -= 0.1 * logits.grad
    levels = logits.log_softmax(-1)
    uniform = -math.log(V)
    responses = [int(token) for row in batch.rows for token in row.response_tokens]
    chances = [levels[t, token].item() for t, token in enumerate(responses)]
    assert min(chances[:3]) > uniform > max(chances[3:])


def test_the_example_is_not_disturbed_by_nan_under_the_mask(thumbs: AnyFamily) -> None:
    of = make_step(thumbs, advantages=[1.0] * 8)
    batch = of.batch()
    poisoned = of.batch(rollout_log_probs=batch.rollout_log_probs.masked_fill(~batch.mask, math.nan))
    clean, got = answer(thumbs, batch, of.columns()), answer(thumbs, poisoned, of.columns())
    assert got.loss == clean.loss
    assert torch.equal(got.gradient, clean.gradient)
