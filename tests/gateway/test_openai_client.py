"""The official client of OpenAI works as it is, and Atoll's additions are where it keeps unknown fields."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.fakes.fake_engine import FakeEngine
from tests.gateway.conftest import TOKEN
from tests.gateway.http_gateway import SCENARIO, HttpGateway, http_gateway


@pytest.fixture
async def guarded(registry_address: str, engine: FakeEngine, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    async with http_gateway(registry_address, tmp_path, (engine.url,), token=TOKEN) as running:
        yield running


def client_of(web: HttpGateway, token: str = TOKEN) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=web.url + "/v1", api_key=token, max_retries=0)


async def test_a_chat_plain_and_streamed(guarded: HttpGateway) -> None:
    async with client_of(guarded) as client:
        plain = await client.chat.completions.create(
            model=SCENARIO, messages=[{"role": "user", "content": "hi"}], temperature=0.7, max_completion_tokens=20
        )
        assert plain.choices[0].message.content and plain.usage is not None and plain.usage.completion_tokens == 6
        assert plain.model_extra is not None
        receipts = [plain.model_extra["atoll"]["receipt"]]
        text = ""
        async for chunk in await client.chat.completions.create(
            model=SCENARIO,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].finish_reason:
                    assert chunk.model_extra is not None
                    receipts.append(chunk.model_extra["atoll"]["receipt"])
            else:
                assert chunk.usage is not None and chunk.usage.completion_tokens == 6
        assert text == plain.choices[0].message.content
        assert {sample.receipt for sample in await guarded.samples()} == set(receipts)


async def test_the_receipt_is_in_the_raw_response_header(guarded: HttpGateway) -> None:
    async with client_of(guarded) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=SCENARIO, messages=[{"role": "user", "content": "hi"}]
        )
        [sample] = await guarded.samples()
        assert raw.headers["x-atoll-receipt"] == sample.receipt


async def test_models(guarded: HttpGateway) -> None:
    async with client_of(guarded) as client:
        assert SCENARIO in [model.id for model in (await client.models.list()).data]


async def test_refusals_are_the_clients_own_exceptions(guarded: HttpGateway, engine: FakeEngine) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    async with client_of(guarded) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=SCENARIO, messages=messages, seed=7)
        assert refused.value.param == "seed" and refused.value.code == "unsupported"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4o", messages=messages)
        engine.behaviour.hang_up_after = 2
        with pytest.raises(openai.APIError) as broken:
            stream = await client.chat.completions.create(model=SCENARIO, messages=messages, stream=True)
            async for _ in stream:
                pass
        assert broken.value.code == "engine_unavailable"
    async with client_of(guarded, "wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
