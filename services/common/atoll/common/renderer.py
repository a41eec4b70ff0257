"""From messages to token ids, once per request: chat template, then tokenizer. Both come from the model's own files.

>>> renderer = Renderer.from_files(files)  # doctest: +SKIP
>>> renderer.render([{"role": "user", "content": "hi"}], limit=2048)  # doctest: +SKIP
[1, 520, 270, 201, 72, 73, 2, 201, 1, 504]
"""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from atoll.api.errors.v1 import errors_pb2
from atoll.common.chat_template import ChatTemplate, Message
from atoll.common.errors import AtollError, InternalError, InvalidInput
from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
)
"""Files of a MODEL artifact that rendering reads; only tokenizer.json and config.json must be there."""

_PLACE = "\ue000the reply\ue001"
"""Stands for a reply while the template says what comes after it: two characters that no text has, and no space at its
ends, which templates cut."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Renderer:
    """Turns messages into the ids that are sent to the engine and recorded.

    vocabulary_size: number of ids of the model, V; an id outside 0..V-1 kills an engine. context_length: what the model
    was built for, P + R at most; an engine may take less.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, vocabulary_size: int, context_length: int) -> None:
        # A training tokenizer may carry them in its file; a prompt is never cut or filled.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._longest_token = max(len(token) for token in tokenizer.get_vocab(with_added_tokens=True))
        self._template = template
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Renderer":
        """files: content by name, of TOKENIZER_FILES those that the model has.

        Raises InternalError, naming the file and what is wrong with it.
        """
        config = _json_file(files, "config.json")
        tokenizer_config = _json_file(files, "tokenizer_config.json") if "tokenizer_config.json" in files else {}
        named = _json_file(files, "special_tokens_map.json") if "special_tokens_map.json" in files else {}
        special_tokens = _special_tokens({**named, **tokenizer_config})
        if "tokenizer.json" not in files:
            raise InternalError("the model has no tokenizer.json: export it with a fast tokenizer")
        try:
            # A broken file makes the library raise a bare Exception.
            tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:
            raise InternalError(f"the model's tokenizer.json cannot be read: {error}") from None
        return cls(
            tokenizer=tokenizer,
            template=ChatTemplate(_template_source(files, tokenizer_config), special_tokens),
            vocabulary_size=_positive(config, "vocab_size"),
            context_length=_positive(config, "max_position_embeddings"),
        )

    def render(self, messages: Sequence[Message], limit: int) -> list[int]:
        """The prompt's token ids, [P], 1 <= P < limit. The template writes its special tokens, the tokenizer adds none.

        Raises InvalidInput when the template refuses the messages, AtollError(SEQUENCE_TOO_LONG).
        """
        return self._checked(self._encoded(self._template.render(messages), limit), limit)

    def extend(self, earlier: Sequence[int], messages: Sequence[Message], turn: int, limit: int) -> list[int] | None:
        """The prompt whose first ids are those of an earlier turn: its prompt and the reply that `messages[turn]` is.

        Only what the template writes after that reply is tokenized. An end token that the reply already has is not
        written twice. None when the template does not write the reply in one place. Raises what `render` does.
        """
        placed = [*messages[:turn], {**messages[turn], "content": _PLACE}, *messages[turn + 1 :]]
        _, found, after = self._template.render(placed).partition(_PLACE)
        if not found or _PLACE in after:
            return None
        last = self._tokenizer.get_added_tokens_decoder().get(earlier[-1])
        if last is not None and last.special:
            after = after.removeprefix(last.content)
        return self._checked([*earlier, *self._encoded(after, limit)], limit)

    def reads(self, ids: Sequence[int], text: str) -> bool:
        """Whether a reply's ids are the text, but for white space at its ends: a stop string cuts the text alone."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip() == text.strip()

    def _encoded(self, text: str, limit: int) -> list[int]:
        # Megabytes without a space take a tokenizer minutes: what cannot fit is refused unseen.
        if len(text) > limit * self._longest_token:
            raise _too_long(f"at least {-(-len(text) // self._longest_token)}", limit)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _checked(self, ids: list[int], limit: int) -> list[int]:
        if not ids:
            raise InvalidInput("the messages render to no tokens at all", field="messages")
        if len(ids) >= limit:
            raise _too_long(str(len(ids)), limit)
        # Only a tokenizer that does not belong to the model does this; the engine would die of it.
        if max(ids) >= self.vocabulary_size:
            raise InternalError(
                f"the messages render to token id {max(ids)}, the model has 0..{self.vocabulary_size - 1}: "
                "tokenizer.json does not belong to this model"
            )
        return ids


def _too_long(count: str, limit: int) -> AtollError:
    return AtollError(
        f"the messages are {count} tokens, the context holds {limit} with the answer: send less",
        reason=errors_pb2.REASON_SEQUENCE_TOO_LONG,
        field="messages",
    )


def _json_file(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    if name not in files:
        raise InternalError(f"the model has no {name}")
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise InternalError(f"the model's {name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InternalError(f"the model's {name} is not a JSON object")
    return content


def _positive(config: Mapping[str, object], key: str) -> int:
    # Models with several towers keep the language model's numbers one level down.
    text_config = config.get("text_config")
    source = cast("dict[str, object]", text_config) if isinstance(text_config, dict) else config
    value = source.get(key)
    if not isinstance(value, int) or value < 1:
        raise InternalError(f"the model's config.json has {key} = {value!r}, expected a positive integer")
    return value


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Named special tokens, which files give as text or as an object with `content`."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(files: Mapping[str, bytes], tokenizer_config: Mapping[str, object]) -> str:
    """The template's own file, else the tokenizer configuration's text, else its list's entry named "default"."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
                return str(entry["template"])
    if isinstance(template, str):
        return template
    raise InternalError(
        "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
    )
