"""Prompts of teachers, rendered as the gateway renders those of students: by the model's own template and tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from atoll.common.errors import BadConfiguration, InternalError
from atoll.common.renderer import TOKENIZER_FILES, Renderer
from atoll.families.rows import Int32
from atoll.families.samples import PromptRenderer
from pydantic import JsonValue


class ModelRenderer:
    """Implements `atoll.families.samples.PromptRenderer` with the files of a model directory."""

    def __init__(self, renderer: Renderer, limit: int) -> None:
        self._renderer = renderer
        self._limit = limit

    @classmethod
    def from_directory(cls, model_directory: Path, limit: int) -> PromptRenderer:
        """`limit`: tokens of the longest row that is trained. Raises BadConfiguration for broken or missing files."""
        paths = {name: model_directory / name for name in TOKENIZER_FILES}
        try:
            return cls(
                Renderer.from_files({name: path.read_bytes() for name, path in paths.items() if path.is_file()}), limit
            )
        except InternalError as error:
            raise BadConfiguration(f"{model_directory}: the family renders prompts, and {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, JsonValue]]) -> Int32:
        """int32 [P]. Raises InvalidInput for messages that the template refuses or that do not fit."""
        return np.asarray(self._renderer.render([_plain(each) for each in messages], self._limit), dtype=np.int32)


def _plain(message: Mapping[str, JsonValue]) -> Mapping[str, str]:
    """A recorded message as the gateway gave it to the template: parts joined line by line, developers as system."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    role = str(message.get("role"))
    return {"role": "system" if role == "developer" else role, "content": str(content or "")}
