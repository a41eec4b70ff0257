"""Rendering equals transformers' `apply_chat_template`, token by token, for the templates of several model families."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from atoll.common.errors import AtollError, InternalError, InvalidInput
from atoll.common.renderer import TOKENIZER_FILES, Renderer
from tokenizers import Tokenizer

LIMIT = 2048

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501

# Each exercises what one family's template does, in our own words.
TEMPLATES = {
    "the tiny model's own": None,
    "chatml": CHATML,
    "smollm2: a system message of its own": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen: whitespace control, namespace, tests on the reversed list": """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""",
    "llama: special tokens by name, trimmed text": (
        "{{- bos_token }}{% for message in messages %}{{- '[' + message['role'] + ']' + message['content'] | trim "
        "+ eos_token }}{% endfor %}{% if add_generation_prompt %}{{- '[assistant]' }}{% endif %}"
    ),
    "generation blocks, loop controls, tojson, a date": (
        "{{ strftime_now('%Y-%m-%d') }}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {% if message.role == 'assistant' %}\n"
        "    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
        "    {% else %}{{ message | tojson }}{{ {'a': '<é>'} | tojson(indent=1) }}\n{% endif %}\n"
        "{% endfor %}\n"
        "{% if not tools %}{{ documents is none }}{% endif %}{% if add_generation_prompt %}A:{% endif %}"
    ),
}

CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "2 + 2 = ?\n\n"}],
    [
        {"role": "user", "content": "é 世界 🙂 \u200d <|im_end|> <b>&amp;</b>"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "  def f(x):\n\treturn x  # {{ not }} {% a %} template\n"},
    ],
]


def model_with(directory: Path, base: Path, template: str | None) -> Path:
    """A copy of the tiny model's tokenizer with another template and a begin token."""
    for name in TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copy(base / name, directory / name)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config["bos_token"] = "<|endoftext|>"
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def files_in(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).exists()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name: str, tiny_models: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = model_with(tmp_path, tiny_models / "student", TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(directory)
    renderer = Renderer.from_files(files_in(directory))
    for chat in CHATS:
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert renderer.render(chat, LIMIT) == list(expected), chat


def test_the_template_may_stand_in_the_tokenizer_configuration(tiny_models: Path, tmp_path: Path) -> None:
    directory = model_with(tmp_path, tiny_models / "student", CHATML)
    expected = Renderer.from_files(files_in(directory)).render(CHATS[1], LIMIT)
    files = files_in(directory)
    config = json.loads(files["tokenizer_config.json"])
    del files["chat_template.jinja"]
    for entry in (CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]):
        files["tokenizer_config.json"] = json.dumps({**config, "chat_template": entry}).encode()
        assert Renderer.from_files(files).render(CHATS[1], LIMIT) == expected


def test_special_tokens_may_be_objects(tiny_models: Path, tmp_path: Path) -> None:
    directory = model_with(tmp_path, tiny_models / "student", "{{ bos_token }}{{ messages[0].content }}")
    files = files_in(directory)
    expected = Renderer.from_files(files).render(CHATS[0], LIMIT)
    config = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps({**config, "bos_token": {"content": "<|endoftext|>"}}).encode()
    assert Renderer.from_files(files).render(CHATS[0], LIMIT) == expected
    assert expected[0] == 0


def test_a_template_that_refuses_the_messages_is_the_clients_error(tiny_models: Path, tmp_path: Path) -> None:
    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
    ):
        directory = model_with(tmp_path, tiny_models / "student", template)
        with pytest.raises(InvalidInput) as refusal:
            Renderer.from_files(files_in(directory)).render(CHATS[0], LIMIT)
        assert refusal.value.field == "messages"


def test_a_template_cannot_reach_the_process(tiny_models: Path, tmp_path: Path) -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        directory = model_with(tmp_path, tiny_models / "student", template)
        with pytest.raises(InvalidInput):
            Renderer.from_files(files_in(directory)).render(CHATS[0], LIMIT)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(tiny_models: Path) -> None:
    renderer = Renderer.from_files(files_in(tiny_models / "student"))
    fitting = renderer.render([{"role": "user", "content": "word " * 100}], LIMIT)
    assert renderer.render([{"role": "user", "content": "word " * 100}], len(fitting) + 1) == fitting
    for content, limit in (("word " * 100, len(fitting)), ("a" * (8 << 20), LIMIT)):
        with pytest.raises(AtollError) as refusal:
            renderer.render([{"role": "user", "content": content}], limit)
        assert refusal.value.code == "sequence_too_long" and refusal.value.field == "messages"


def test_model_files_that_cannot_work_are_named(tiny_models: Path) -> None:
    files = files_in(tiny_models / "student")
    broken = {
        "tokenizer.json": b"{}",
        "config.json": b'{"vocab_size": 0, "max_position_embeddings": 5}',
        "tokenizer_config.json": b"[",
        "chat_template.jinja": b"{% if %}",
    }
    for name, content in broken.items():
        with pytest.raises(InternalError, match=name if name != "chat_template.jinja" else "chat template"):
            Renderer.from_files({**files, name: content})
    for name in ("tokenizer.json", "config.json"):
        with pytest.raises(InternalError, match=name):
            Renderer.from_files({key: value for key, value in files.items() if key != name})
    del files["chat_template.jinja"]
    with pytest.raises(InternalError, match="no chat template"):
        Renderer.from_files(files)


END = 2
QUESTION = {"role": "user", "content": "Say hello."}
FOLLOW_UP = {"role": "user", "content": "And now?"}


def spelled(files: Mapping[str, bytes], text: str) -> list[int]:
    """A token for every letter, as no tokenizer writes it and a model may well sample it."""
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    return [tokenizer.encode(letter).ids[0] for letter in text]


@pytest.mark.parametrize("template", [None, CHATML], ids=["own", "chatml"])
def test_a_later_prompt_begins_with_the_ids_of_the_earlier_turn_whatever_its_text_would_become(
    tiny_models: Path, tmp_path: Path, template: str | None
) -> None:
    files = files_in(model_with(tmp_path, tiny_models / "student", template))
    renderer, reply = Renderer.from_files(files), [*spelled(files, "hello"), END]
    assert renderer.reads(reply, "hello")
    messages = [QUESTION, {"role": "assistant", "content": "hello"}, FOLLOW_UP]
    earlier = [*renderer.render([QUESTION], LIMIT), *reply]
    extended = renderer.extend(earlier, messages, 1, LIMIT)
    assert extended is not None and extended[: len(earlier)] == earlier
    canonical = renderer.render(messages, LIMIT)
    new = extended[len(earlier) :]
    assert canonical[-len(new) :] == new, "what is new is rendered as ever"
    assert len(canonical) < len(extended), "the reply's own text would be fewer tokens"


def test_a_reply_that_was_cut_gets_the_end_that_it_lacks(tiny_models: Path) -> None:
    files = files_in(tiny_models / "student")
    renderer, reply = Renderer.from_files(files), spelled(files, "hello")
    messages = [QUESTION, {"role": "assistant", "content": "hello"}, FOLLOW_UP]
    cut = renderer.extend(reply, messages, 1, LIMIT)
    ended = renderer.extend([*reply, END], messages, 1, LIMIT)
    assert cut == ended and cut is not None and cut.count(END) == 2, "one after each turn"


def test_a_template_that_does_not_keep_the_reply_extends_nothing(tiny_models: Path, tmp_path: Path) -> None:
    forgetful = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}!"
    renderer = Renderer.from_files(files_in(model_with(tmp_path, tiny_models / "student", forgetful)))
    assert renderer.extend([72], [QUESTION, {"role": "assistant", "content": "b"}], 1, LIMIT) is None


def test_an_extended_prompt_that_does_not_fit_is_refused(tiny_models: Path) -> None:
    renderer = Renderer.from_files(files_in(tiny_models / "student"))
    with pytest.raises(AtollError) as refusal:
        renderer.extend([72] * LIMIT, [QUESTION, {"role": "assistant", "content": "b"}], 1, LIMIT)
    assert refusal.value.code == "sequence_too_long"


def test_a_reply_whose_text_lost_a_stop_string_is_told_from_one_that_is_whole(tiny_models: Path) -> None:
    files = files_in(tiny_models / "student")
    renderer, ids = Renderer.from_files(files), spelled(files, "fourEND")
    assert renderer.reads(ids, "fourEND") and renderer.reads([*ids, END], "fourEND\n")
    assert not renderer.reads(ids, "four")
