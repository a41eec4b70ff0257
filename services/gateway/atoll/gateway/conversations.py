"""Finds the sample that a request goes on from, so that its prompt is the tokens that were sampled, not their text.

A reply that is tokenized again often becomes other tokens, and the turns of a conversation would not be one row.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from atoll.common.chat_template import Message
from atoll.common.renderer import Renderer
from atoll.gateway.database import Database
from atoll.gateway.tables import samples
from sqlalchemy import select


def conversation_key(messages: Sequence[Message]) -> str:
    """Digest of messages as the template sees them. Example: "9f2c...", 64 characters"""
    text = json.dumps([[message["role"], message["content"]] for message in messages], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class EarlierTurn:
    """A sample whose reply is `messages[turn]` of a later request."""

    turn: int
    token_ids: list[int]
    """[P + R]"""
    prompt_length: int
    text: str

    def extended(self, renderer: Renderer, messages: Sequence[Message], limit: int) -> list[int] | None:
        """The prompt of the later request; None when this sample's tokens do not stand for what the client sent: a stop
        string was cut from the reply, or the template does not keep replies as they are. Raises what `render` does."""
        if not renderer.reads(self.token_ids[self.prompt_length :], self.text):
            return None
        return renderer.extend(self.token_ids, messages, self.turn, limit)


class Conversations:
    """Looks samples up by the messages and the reply they recorded."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def earlier(self, scenario: str, messages: Sequence[Message]) -> EarlierTurn | None:
        """The newest sample of the latest turn that the messages go on from. Raises Unavailable."""
        turns = {
            conversation_key(messages[: index + 1]): index
            for index, message in enumerate(messages)
            if index and message["role"] == "assistant"
        }
        return await asyncio.to_thread(self._read, scenario, turns) if turns else None

    def _read(self, scenario: str, turns: Mapping[str, int]) -> EarlierTurn | None:
        own = samples.c
        with self._database.reading() as connection:
            known = select(own.conversation, own.position).where(
                own.scenario == scenario, own.conversation.in_(list(turns)), own.response_length > 0
            )
            found = [(turns[row.conversation], row.position) for row in connection.execute(known)]
            if not found:
                return None
            turn, position = max(found)
            row = connection.execute(
                select(own.tensors, own.prompt_length, own.response_length, own.text).where(own.position == position)
            ).one()
        ids = np.frombuffer(row.tensors, "<i4", row.prompt_length + row.response_length)
        return EarlierTurn(turn, ids.tolist(), row.prompt_length, row.text)
