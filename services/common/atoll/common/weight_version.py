"""The name an engine gives to the weights it serves: "<incarnation>:<version number>"."""

import re
from dataclasses import dataclass

from atoll.common.errors import InvalidInput

_PATTERN = re.compile(r"([1-9][0-9]{0,9}):(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, order=True)
class WeightVersion:
    """Example: WeightVersion(incarnation=1, number=7), written "1:7"."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> "WeightVersion":
        """Raises InvalidInput unless the text is exactly what str() writes."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise InvalidInput(f"weight version is {text!r}, expected <incarnation>:<number>, e.g. 1:7")
        return cls(int(match[1]), int(match[2]))
