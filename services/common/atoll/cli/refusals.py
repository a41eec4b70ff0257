"""How commands read the token, and end when something is refused."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer
from atoll.common.errors import AtollError


def token_from_environment() -> str | None:
    """From the environment alone: arguments can be read by everybody on the machine."""
    return os.environ.get("ATOLL_TOKEN") or None


@contextlib.contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Ends the command with status 1 and the refusal's words."""
    try:
        yield
    except AtollError as error:
        fail(" ".join(error.message.split()), 1)


def fail(message: str, status: int) -> NoReturn:
    print(f"atoll: {message}", file=sys.stderr)
    raise typer.Exit(status)
