"""The `atoll` command."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer
from atoll.cli.family_flags import overrides_of
from atoll.cli.serve import StackEvent, StackFailed, cancelled_by_signals, run_stack
from atoll.cli.stack_file import Stack, find_stack, load_stack
from atoll.cli.status import read_status, status_view
from atoll.cli.versions import read_versions, version_as_json, versions_table
from atoll.common.errors import AtollError, BadConfiguration
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Keeps a language model learning from the traffic it serves."
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    stack: Annotated[
        str, typer.Option("-c", "--config", help="A stack file, or the name of one that comes with Atoll.")
    ],
) -> None:
    """Start every service of a stack file, in order, and stop them all on Ctrl-C.

    Any value of the file can be set: --services.engine.ready_timeout 300. Options of its loss family have flags too:
    --grpo-eps-clip 0.1
    """
    try:
        path = find_stack(stack)
        checked = load_stack(path, overrides_of(path, context.args))
        asyncio.run(_serve_until_stopped(checked))
    except BadConfiguration as error:
        _fail(error.message, 2)
    except StackFailed as error:
        _fail(str(error), 1)


Json = Annotated[bool, typer.Option("--json", help="For scripts.")]


@app.command()
def versions(
    scenario: Annotated[
        str | None, typer.Option(envvar="ATOLL_SCENARIO", help="May be left out when there is only one.")
    ] = None,
    registry: Annotated[str, typer.Option(envvar="ATOLL_REGISTRY", help="host:port.")] = "127.0.0.1:7410",
    as_json: Json = False,
) -> None:
    """Show the version chain of a scenario, newest first. The token is read from ATOLL_TOKEN."""
    with _refusals_in_one_line():
        chain = asyncio.run(read_versions(registry, scenario, _token()))
    if as_json:
        print(json.dumps([version_as_json(version) for version in chain], indent=2))
    else:
        Console().print(versions_table(chain))


@app.command()
def status(
    gateway: Annotated[str, typer.Option(envvar="ATOLL_GATEWAY", help="Base URL.")] = "http://127.0.0.1:8100",
    as_json: Json = False,
) -> None:
    """Show what the gateway serves and trains. The token is read from ATOLL_TOKEN."""
    with _refusals_in_one_line():
        body = asyncio.run(read_status(gateway, _token()))
    if as_json:
        print(json.dumps(body, indent=2))
    else:
        Console().print(status_view(body))


def _token() -> str | None:
    """From the environment alone: arguments can be read by everybody on the machine."""
    return os.environ.get("ATOLL_TOKEN") or None


@contextlib.contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    try:
        yield
    except AtollError as error:
        _fail(" ".join(error.message.split()), 1)


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
