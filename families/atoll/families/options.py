"""Options of a family: one frozen model, read from YAML keys or from `--<family>-*` flags."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, get_args

from atoll.families.refusals import option_refused, option_unknown
from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo


class FamilyOptions(BaseModel):
    """Base of every family's options. A field `eps_clip` is the YAML key `eps_clip` and the flag `--<family>-eps-clip`.

    Values are read strictly: a number is not taken from a string or from true/false, and no number may be
    infinite or NaN.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_mapping(cls, family: str, values: Mapping[str, JsonValue]) -> Self:
        """Reads options as they stand in YAML or JSON.

        Raises: InvalidInput naming the option, what was expected and what was given.
        """
        cls._refuse_unknown(family, [name for name in values if name not in cls.model_fields], spell=str)
        try:
            # JSON mode, because strict Python mode takes an enumeration only as its Python object.
            return cls.model_validate_json(json.dumps(dict(values)), strict=True)
        except ValidationError as error:
            raise _first_refusal(family, error) from None
        except TypeError as error:
            raise option_refused(
                f"{family}: options must be plain YAML or JSON values: {error}", field="options"
            ) from None

    @classmethod
    def values_from_flags(cls, family: str, argv: Sequence[str]) -> tuple[dict[str, JsonValue], list[str]]:
        """Takes this family's flags out of a command line; returns the options that were given, and the other words.

        `--grpo-eps-clip 0.2`, `--grpo-eps-clip=0.2`; a boolean takes `true` or `false`, and a bare flag means true;
        `none` where none is allowed. Without defaults: they are laid over the options of a YAML file.
        Raises: InvalidInput naming the flag.
        """
        prefix = f"--{family}-"
        values: dict[str, JsonValue] = {}
        rest: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith(prefix):
                rest.append(word)
                continue
            flag, has_value, text = word.partition("=")
            name = flag.removeprefix(prefix).replace("-", "_")
            cls._refuse_unknown(family, [name] if name not in cls.model_fields else [], spell=_flag_speller(family))
            if name in values:
                raise option_refused(f"{flag} is given twice; give it once", field=flag)
            if not has_value:
                is_bare = not words or words[0].startswith("--")
                if is_bare and cls.model_fields[name].annotation is not bool:
                    raise option_refused(
                        f"{flag} needs a value, e.g. {flag} {cls.model_fields[name].default}", field=flag
                    )
                text = "true" if is_bare else words.pop(0)
            values[name] = _value_of_flag(flag, text, cls.model_fields[name])
        return values, rest

    def canonical_json(self) -> str:
        """All options with their defaults, as JSON with sorted keys: equal options have equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @classmethod
    def _refuse_unknown(cls, family: str, names: Sequence[str], *, spell: Callable[[str], str]) -> None:
        for name in names:
            close = difflib.get_close_matches(name, cls.model_fields, n=1)
            hint = f"did you mean {spell(close[0])}?" if close else "known: " + ", ".join(map(spell, cls.model_fields))
            raise option_unknown(f"{family} has no option {spell(name)}; {hint}", field=spell(name))


def _flag_speller(family: str) -> Callable[[str], str]:
    return lambda name: f"--{family}-{name.replace('_', '-')}"


def _value_of_flag(flag: str, text: str, field: FieldInfo) -> JsonValue:
    """Reads a flag's text with the type of its field; range checks are left to the model."""
    annotation: Any = field.annotation
    if text == "none" and type(None) in get_args(annotation):
        return None
    adapter = TypeAdapter[object](annotation)
    try:
        value: JsonValue = adapter.dump_python(adapter.validate_strings(text), mode="json")
    except ValidationError as error:
        raise option_refused(f"{flag} {text}: {error.errors()[0]['msg']}", field=flag) from None
    return value


def _first_refusal(family: str, error: ValidationError) -> Exception:
    detail = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in detail["loc"]) or "options"
    missing = detail["type"] == "missing"
    given = "; it has no default" if missing else f", got {detail['input']!r}" if detail["loc"] else ""
    return option_refused(f"{family}: {name}: {detail['msg'].removeprefix('Value error, ')}{given}", field=name)
