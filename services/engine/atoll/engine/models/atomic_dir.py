"""Directories that are either complete or absent."""

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE_FILE = "atoll_recipe.json"


class ModelDirectoryError(ValueError):
    """Raised when the output directory holds something else than the model that was asked for."""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(out: Path, recipe: str, build: Callable[[Path], None]) -> bool:
    """Fill `out` by `build(empty directory)` unless it already holds the result of the same recipe.

    The work happens in a sibling directory that is renamed at the end, so half a model never stands under `out`, not
    even after a kill; two processes that build the same directory do the work once.

    Args:
        recipe: what was asked for, as a JSON document, e.g. `{"model": "tiny", "seed": 1}`. Kept beside the model.

    Returns:
        True when the model was built, False when it was there.

    Raises:
        ModelDirectoryError: `out` exists and holds another model, or anything else.
    """
    with _locked(out.parent / f".{out.name}.lock"):
        if out.exists():
            found = (out / RECIPE_FILE).read_text() if (out / RECIPE_FILE).is_file() else "no recipe file"
            if found != recipe:
                raise ModelDirectoryError(
                    f"{out} exists and is not the model asked for: expected {recipe}, got {found}; "
                    "choose another --out or remove it"
                )
            return False
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            staging.chmod(0o755)
            build(staging)
            (staging / RECIPE_FILE).write_text(recipe)
            # Weights come out as 0600, and the engine may run as another user.
            for file in staging.iterdir():
                file.chmod(0o644)
            staging.rename(out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return True
