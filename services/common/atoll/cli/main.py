"""The `atoll` command."""

import asyncio
from typing import Annotated

import typer
from atoll.cli.client_commands import add_to
from atoll.cli.family_flags import overrides_of
from atoll.cli.refusals import fail
from atoll.cli.serve import StackEvent, StackFailed, cancelled_by_signals, run_stack
from atoll.cli.stack_file import Stack, find_stack, load_stack
from atoll.common.errors import BadConfiguration
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
        fail(error.message, 2)
    except StackFailed as error:
        fail(str(error), 1)


add_to(app)


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
