"""`python -m atoll.engine.models tiny|smollm2 --out DIR`."""

from pathlib import Path
from typing import Annotated

import typer
from atoll.engine.models.atomic_dir import ModelDirectoryError
from atoll.engine.models.smollm2 import SmolLm2Error, make_smollm2
from atoll.engine.models.tiny import Architecture, make_tiny

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Makes small models without a model hub.")

Out = Annotated[Path, typer.Option(help="The model directory to write; reused when it is already complete.")]


@app.command()
def tiny(
    out: Out,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
    architecture: Annotated[Architecture, typer.Option(help="The model class.")] = Architecture.QWEN3,
) -> None:
    """A random two-layer chat model with a vocabulary of 1,024 tokens (1 MB)."""
    typer.echo(make_tiny(out, seed, architecture))


@app.command()
def smollm2(out: Out) -> None:
    """SmolLM2-135M-Instruct, which answers English (538 MB; fetched once, then kept in the user's cache)."""
    typer.echo(make_smollm2(out))


if __name__ == "__main__":
    try:
        app()
    except (ModelDirectoryError, SmolLm2Error) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
