"""A model's chat template, rendered as transformers renders it (a parity test compares the two).

Why not transformers itself: its tokenizer classes pull torch in wherever torch is installed, and the gateway runs
without it. What is reproduced is `apply_chat_template` of transformers 5: the sandbox, its whitespace settings, the
helper functions and the `{% generation %}` block that templates may contain.

>>> ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}", {}).render(
...     [{"role": "user", "content": "hi"}])
'user:hi '
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from atoll.common.errors import InternalError, InvalidInput
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""What a template sees of a message. Example: {"role": "user", "content": "hi"}"""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (how jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the local time is part of the convention


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the special tokens it may name, e.g. {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises InternalError when the source is not a template: the model's files are broken."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InternalError(f"the model's chat template does not compile: line {error.lineno}: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text, ending where the assistant's answer begins.

        Raises InvalidInput when the template refuses the messages, e.g. two user messages in a row.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidInput(f"the model's chat template refuses these messages: {error}", field="messages") from None
