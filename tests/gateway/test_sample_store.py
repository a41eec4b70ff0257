"""Samples come back as they were recorded, page by page and state by state."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from atoll.common.errors import AtollError, InternalError, InvalidInput
from atoll.families.rows import VersionSpan
from atoll.gateway.job_settling import settle
from atoll.gateway.records import BatchState, JobOutcome, JsonObject, NewReport, SampleState, Settlement
from atoll.gateway.tables import samples
from sqlalchemy import update

from tests.gateway.store_world import SCENARIO, new_sample, open_world, report_on

pytestmark = pytest.mark.usefixtures("both_databases")


async def test_a_sample_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        receipt = world.gateway.receipts.issue(SCENARIO)
        new = replace(
            new_sample(receipt, top_k=2, temperature=0.7),
            spans=(VersionSpan(0, 1, "1:4"), VersionSpan(1, 4, "1:5")),
            finish_reason="length",
            text="vier \u0000 \U0001f600",
        )
        await world.gateway.writer.record(new)
        sample = (await world.gateway.samples.get(SCENARIO, receipt)).sample
        kept = {field: value for field, value in asdict(sample).items() if hasattr(new, field)}
        given = {field: value for field, value in asdict(new).items() if field in kept}
        assert kept == given and len(kept) == 11
        assert (sample.state, sample.prompt_length, sample.response_length, sample.top_k) == ("pending", 3, 4, 2)


async def test_a_batch_is_read_in_its_order_with_its_reports(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        job_id, receipts = await world.batch()
        batch = await world.gateway.samples.open_batch(job_id)
        rows = [row async for row in batch.rows]
        assert (batch.scenario, batch.row_count) == (SCENARIO, 2)
        assert [row.packed.sample.receipt for row in rows] == receipts
        assert [[report.receipts for report in row.reports] for row in rows] == [[(receipt,)] for receipt in receipts]
        assert [report.score for row in rows for report in row.reports] == [1.0, 1.0]
        again = [row async for row in (await world.gateway.samples.open_batch(job_id)).rows]
        assert [row.packed.tensors for row in again] == [row.packed.tensors for row in rows]


async def test_pages_hold_every_sample_once_newest_first(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        recorded = [(await world.record())[0] for _ in range(5)]
        found: list[str] = []
        token, pages = "", 0
        while True:
            samples, token = await world.gateway.samples.page(SCENARIO, None, 2, token)
            found += [sample.receipt for sample in samples]
            pages += 1
            if not token:
                break
        assert found == recorded[::-1] and pages == 3


async def test_a_page_of_long_chats_ends_early_and_goes_on(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        receipts = [world.gateway.receipts.issue(SCENARIO) for _ in range(5)]
        long_chat: JsonObject = {"messages": [{"role": "user", "content": "x" * 600_000}]}
        for receipt in receipts:
            await world.gateway.writer.record(new_sample(receipt, request=long_chat))
        seen: list[str] = []
        sizes: list[int] = []
        token = ""
        while True:
            page, token = await world.gateway.samples.page(SCENARIO, None, 100, token)
            sizes.append(len(page))
            seen += [sample.receipt for sample in page]
            if not token:
                break
        assert seen == receipts[::-1] and sizes == [1] * 5


async def test_samples_are_listed_by_where_they_stand(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:

        async def in_state(state: SampleState) -> set[str]:
            return {sample.receipt for sample in (await world.gateway.samples.page(SCENARIO, state))[0]}

        consumed_job, consumed = await world.batch("a")
        settle(world.gateway.database, consumed_job, JobOutcome(BatchState.COMMITTED, version=1))
        settled_job, settled = await world.batch("b")
        settle(
            world.gateway.database,
            settled_job,
            JobOutcome(BatchState.FAILED, Settlement("training_crashed", "three times")),
        )
        _, reserved = await world.batch("c")
        pending = await world.record(2)
        await world.gateway.reports.create(report_on(pending[0], group="d"))
        assert await in_state(SampleState.CONSUMED) == set(consumed)
        assert await in_state(SampleState.SETTLED) == set(settled)
        assert await in_state(SampleState.RESERVED) == set(reserved)
        assert await in_state(SampleState.PENDING) == set(pending)


async def test_what_is_not_there_is_told_apart(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        (receipt,) = await world.record()
        handed_out = world.gateway.receipts.issue(SCENARIO)
        for scenario, asked, code in (
            (SCENARIO, handed_out, "receipt_not_recorded"),
            (SCENARIO, "0" * 32, "receipt_not_found"),
            ("chat", receipt, "receipt_not_found"),
            (SCENARIO, "\ud800", "receipt_not_found"),
        ):
            with pytest.raises(AtollError) as refusal:
                await world.gateway.samples.get(scenario, asked)
            assert refusal.value.code == code
        with pytest.raises(AtollError) as refusal:
            await world.gateway.samples.open_batch("job-0")
        assert refusal.value.code == "job_not_found"
        for token in ("!", "Zm9v", "LTE="):
            with pytest.raises(InvalidInput, match="page_token"):
                await world.gateway.samples.page(SCENARIO, None, 2, token)


async def test_bytes_that_were_cut_are_not_handed_out(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        (receipt,) = await world.record()
        packed = await world.gateway.samples.get(SCENARIO, receipt)
        assert np.frombuffer(packed.tensors, "<i4", 7).min() >= 0
        with world.gateway.database.writing() as other:
            other.execute(update(samples).values(tensors=b"12345678"))
        with pytest.raises(InternalError) as refusal:
            await world.gateway.samples.get(SCENARIO, receipt)
        assert refusal.value.code == "sample_corrupt"


async def test_every_character_that_a_model_may_sample_is_read_back(tmp_path: Path) -> None:
    text = '\x00 \x01 \u2028 \U0001f642 \ufffd " \\'
    async with open_world(tmp_path) as world:
        receipt = world.gateway.receipts.issue(SCENARIO)
        request: JsonObject = {"messages": [{"role": "user", "content": text}]}
        await world.gateway.writer.record(replace(new_sample(receipt, request=request), text=text))
        sample = (await world.gateway.samples.get(SCENARIO, receipt)).sample
        assert sample.text == text and sample.request == request
        metadata: JsonObject = {"group": text}
        await world.gateway.reports.create(NewReport(SCENARIO, (receipt,), 1.0, feedback=text, metadata=metadata))
        [report] = (await world.gateway.samples.get_with_reports(SCENARIO, receipt)).reports
        assert report.feedback == text and report.metadata == metadata
