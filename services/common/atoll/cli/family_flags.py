"""Flags of a loss family on the command line of `atoll serve`: `--grpo-eps-clip 0.1` sets an option of the scenario.

A stack file names the scenario's family and its options in `vars.family` and `vars.options`; a flag is one more key of
those options, so nothing but the scenario's options ever reaches a service.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from atoll.common.errors import AtollError, BadConfiguration
from atoll.families.catalog import resolve_family
from pydantic import JsonValue

FAMILY = "vars.family"
OPTIONS = "vars.options"


def overrides_of(path: Path, words: Sequence[str]) -> list[tuple[str, str]]:
    """The words of `serve` as (dotted path, YAML text), flags of the stack's family laid over its options.

    Raises BadConfiguration naming the flag, and for words that are no flag at all.
    """
    if not any(word.startswith("--") and "." not in word.partition("=")[0] for word in words):
        return parse_overrides(words)
    values = _variables(path)
    # Which words are values is only known once the flags are out, and these need the family.
    family = _text_of(words, f"--{FAMILY}") or values.get("family")
    if not isinstance(family, str):
        return parse_overrides(words)
    try:
        kind = resolve_family(family)
        given, rest = kind.Options.values_from_flags(kind.name, words)
        pairs = parse_overrides(rest)
        if not given:
            return pairs
        merged = {**_options_of(values, pairs), **given}
        kind.from_options(merged)
    except AtollError as error:
        raise BadConfiguration(error.message, field=error.field) from error
    # Before the others: one of them may set a single key of the options.
    return [(OPTIONS, json.dumps(merged)), *(pair for pair in pairs if pair[0] != OPTIONS)]


def _options_of(values: Mapping[str, object], pairs: Sequence[tuple[str, str]]) -> dict[str, JsonValue]:
    """The options that flags are laid over. Raises BadConfiguration where they are no map."""
    options = values.get("options")
    for dotted, text in pairs:
        if dotted == OPTIONS:
            try:
                options = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise BadConfiguration(f"--{OPTIONS}: the value {text!r} is not YAML: {error}") from None
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise BadConfiguration(f"{OPTIONS} is {options!r}, expected a map of the family's options")
    return options


def parse_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs from `--dotted.path value` and `--dotted.path=value`. Raises BadConfiguration for anything else."""
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise BadConfiguration(f"{word!r} is not an option of serve; values are set with --dotted.path value")
        if not equals:
            if not rest:
                raise BadConfiguration(f"{word} needs a value")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def _text_of(words: Sequence[str], flag: str) -> str | None:
    """The last value that the words give a flag."""
    found = None
    for number, word in enumerate(words):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag and number + 1 < len(words):
            found = words[number + 1]
    return found


def _variables(path: Path) -> dict[str, object]:
    """`vars` of a stack file; none of a file that `load_stack` will refuse."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    found = document.get("vars") if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}
