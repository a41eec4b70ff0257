"""The `atoll` command."""

import asyncio
import sys
from typing import Annotated, NoReturn

import typer
from atoll.cli.serve import StackEvent, StackFailed, cancelled_by_signals, run_stack
from atoll.cli.stack_file import Stack, find_stack, load_stack
from atoll.common.errors import BadConfiguration
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Keeps a language model learning from the traffic it serves."
)


@app.callback()
def _atoll() -> None:
    """Makes typer keep subcommands even while there is one."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    stack: Annotated[
        str, typer.Option("-c", "--config", help="A stack file, or the name of one that comes with Atoll.")
    ],
) -> None:
    """Start every service of a stack file, in order, and stop them all on Ctrl-C.

    Any value of the file can be set: --services.engine.ready_timeout 300
    """
    try:
        checked = load_stack(find_stack(stack), parse_overrides(context.args))
        asyncio.run(_serve_until_stopped(checked))
    except BadConfiguration as error:
        _fail(error.message, 2)
    except StackFailed as error:
        _fail(str(error), 1)


def parse_overrides(words: list[str]) -> list[tuple[str, str]]:
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


async def _serve_until_stopped(stack: Stack) -> None:
    console = Console(highlight=False)

    async def wait_for_ever() -> None:
        console.print(
            f"[bold]ready[/bold]: {len(stack.services)} services; logs in {stack.run_dir / 'logs'}; Ctrl-C stops"
        )
        await asyncio.Event().wait()

    try:
        with cancelled_by_signals():
            await run_stack(stack, wait_for_ever, lambda event: show_event(console, event))
    except asyncio.CancelledError:
        console.print("stopped")


def show_event(console: Console, event: StackEvent) -> None:
    """One line for a person."""
    after = f" after {event.seconds:.1f} s" if event.what in ("ready", "stopped") else ""
    console.print(f"{event.service:>12}  {event.what}{after}")


def _fail(message: str, status: int) -> NoReturn:
    print(f"atoll: {message}", file=sys.stderr)
    raise typer.Exit(status)
