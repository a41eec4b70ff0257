"""From an HTTP body to a chat that nothing speaks against. Every refusal of a chat request happens here."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from atoll.api.errors.v1 import errors_pb2
from atoll.common.chat_template import Message
from atoll.common.engine_types import SamplingParams
from atoll.common.errors import AtollError, Conflict, InvalidInput, NotFound
from atoll.common.renderer import Renderer
from atoll.gateway.conversations import Conversations, EarlierTurn
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.head import Head
from atoll.gateway.openai_schema import ChatRequest
from atoll.gateway.receipts import Receipts
from atoll.gateway.records import JsonObject
from atoll.gateway.registry_reader import RegistryReader
from atoll.gateway.renderers import Renderers
from atoll.gateway.scenario_choice import ScenarioChoice, choose_scenario, known_scenario
from atoll.gateway.scenarios import ScenarioDirectory
from atoll.gateway.schema_errors import validated
from atoll.gateway.strangers import Strangers
from atoll.gateway.strict_json import parse_object
from atoll.gateway.unsupported import without_unsupported
from atoll.gateway.version_contents import Pin, VersionContents, is_weight_version

GREEDY_BELOW = 1e-6
"""SGLang samples greedily below this temperature and reports the log-probs of temperature 1."""

ENGINE_RESERVE = 7
"""SGLang takes a prompt of at most its context length minus this (measured, 0.5.23)."""

RENDER_IN_THREAD_BYTES = 32 << 10
"""A longer body takes milliseconds to tokenize, which other requests' tokens should not wait for."""


@dataclass(frozen=True)
class Chat:
    """A checked request. Example: Chat("math", request, {"messages": [...]}, [...], [5, 6], SamplingParams(64), 1024,
    top_k=0, receipts=("4f0c...",), head=Head(3, "1:3", frozenset({"1:3"})), pinned=None, strangers=frozenset(),
    created_at=now)"""

    scenario: str
    request: ChatRequest
    body: JsonObject
    """As received, for the record."""
    messages: list[Message]
    """As the template saw them."""
    prompt_ids: list[int]
    params: SamplingParams
    vocabulary_size: int
    top_k: int
    """K: how many of the most likely ids are recorded with every token; 0: none."""
    receipts: tuple[str, ...]
    """One per choice."""
    head: Head | None
    """The newest version, as last heard."""
    pinned: Pin | None
    """The only version that may answer."""
    strangers: frozenset[str]
    """URLs of engines that serve another scenario."""
    created_at: datetime


class ChatPreparer:
    """Resolves, renders and checks. Stores nothing."""

    def __init__(
        self,
        scenarios: ScenarioDirectory,
        receipts: Receipts,
        registry: RegistryReader,
        renderers: Renderers,
        conversations: Conversations,
        engines: EnginePool,
        default_scenario: str | None,
        capture_top_k: int,
    ) -> None:
        """capture_top_k: recorded at least, also where the scenario's family asks for fewer."""
        self._scenarios = scenarios
        self._receipts = receipts
        self._registry = registry
        self._renderers = renderers
        self._conversations = conversations
        self._engines = engines
        self._default_scenario = default_scenario
        self._capture_top_k = capture_top_k
        self._contents = VersionContents(registry)
        self._strangers = Strangers(self._contents)

    async def prepare(self, raw: bytes, scenario_header: str | None) -> Chat:
        """Raises InvalidInput, NotFound (unknown scenario), Conflict (version not served), Unavailable (registry)."""
        body = parse_object(raw)
        request = validated(ChatRequest, without_unsupported(body))
        choice = choose_scenario(scenario_header, request.model, self._default_scenario)
        scenario = await known_scenario(choice, self._scenarios)
        pinned = None if choice.number is None else await self._served(choice)
        renderer = await self._renderers.get(scenario)
        limit = min(renderer.context_length, await self._engines.context_length() or renderer.context_length)
        messages: list[Message] = [message.template_message for message in request.messages]
        prompt_ids = await self._prompt(scenario, renderer, messages, limit - ENGINE_RESERVE + 1, len(raw))
        return Chat(
            scenario=scenario,
            request=request,
            body=body,
            messages=messages,
            prompt_ids=prompt_ids,
            params=_sampling(request, len(prompt_ids), limit, renderer.vocabulary_size),
            vocabulary_size=renderer.vocabulary_size,
            top_k=await self._top_k(scenario, renderer.vocabulary_size),
            receipts=tuple(self._receipts.issue(scenario) for _ in range(request.n)),
            head=self._scenarios.head(scenario),
            pinned=pinned,
            strangers=await self._strangers.among(self._engines.engines, scenario),
            created_at=datetime.now(UTC),
        )

    async def _prompt(
        self, scenario: str, renderer: Renderer, messages: Sequence[Message], limit: int, size: int
    ) -> list[int]:
        """The earlier turn's own ids and what is new, when the messages go on from a sample; else all rendered anew."""

        def render(earlier: EarlierTurn | None) -> list[int]:
            extended = None if earlier is None else earlier.extended(renderer, messages, limit)
            return renderer.render(messages, limit) if extended is None else extended

        earlier = await self._conversations.earlier(scenario, messages)
        if size > RENDER_IN_THREAD_BYTES:
            return await asyncio.to_thread(render, earlier)
        return render(earlier)

    async def _top_k(self, scenario: str, vocabulary_size: int) -> int:
        """What the family or the deployment wants, whichever is more; the whole vocabulary is all there is."""
        family = (await self._scenarios.get(scenario)).family
        return min(max(family.sampler_top_k, self._capture_top_k), vocabulary_size)

    async def _served(self, choice: ScenarioChoice) -> Pin:
        """The version that the request insists on, when an engine serves its weights right now."""
        assert choice.number is not None
        try:
            wanted = await self._registry.version(choice.scenario, choice.number)
        except NotFound as error:
            raise NotFound(error.message, reason=error.reason, field=choice.field) from None
        await self._engines.probe()
        served = {engine.weight_version for engine in self._engines.engines if engine.healthy and engine.weight_version}
        pin = Pin(choice.scenario, wanted.weight_version, wanted.model_digest, frozenset(), self._contents)
        names = frozenset([name for name in served if is_weight_version(name) and await pin.allows(name)])
        if not names:
            raise Conflict(
                f"version {choice.number} of {choice.scenario} ({wanted.weight_version}) is not served, "
                f"{', '.join(sorted(served)) or 'nothing'} is; ask for model {choice.scenario!r} to get the newest",
                reason=errors_pb2.REASON_VERSION_NOT_SERVED,
                field=choice.field,
            )
        return replace(pin, served=names)


def _sampling(request: ChatRequest, prompt_length: int, limit: int, vocabulary_size: int) -> SamplingParams:
    max_new_tokens = request.token_limit or limit - prompt_length
    if prompt_length + max_new_tokens > limit:
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise AtollError(
            f"the messages are {prompt_length} tokens and {field} is {max_new_tokens}, the context holds {limit}: "
            f"ask for at most {limit - prompt_length}",
            reason=errors_pb2.REASON_SEQUENCE_TOO_LONG,
            field=field,
        )
    for token in request.logit_bias_by_id:
        if token >= vocabulary_size:
            raise InvalidInput(
                f"logit_bias names token {token}, the model has 0..{vocabulary_size - 1}", field=f"logit_bias.{token}"
            )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if request.temperature < GREEDY_BELOW else request.temperature,
        top_p=request.top_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        stop=request.stop_strings,
        logit_bias=request.logit_bias_by_id,
    )
