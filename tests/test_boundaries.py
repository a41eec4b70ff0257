"""Who may import whom: read from the source of every module, and proven once more by importing without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = {"api", "common"}

MAY_IMPORT = {
    "common": {"api"},
    "cli": SHARED | {"families"},
    "families": SHARED,
    "registry": SHARED | {"families"},
    "gateway": SHARED | {"families"},
    "teacher": SHARED | {"families"},
    "trainer": SHARED | {"families"},
    "engine": SHARED,
}
"""Room -> the other rooms that it may import. A service reaches another one over the wire only."""

HEAVY = {"torch", "transformers", "megatron", "sglang", "ray", "safetensors", "torchvision"}
HEAVY_ROOMS = {"trainer", "engine"}
"""Rooms that run models; everything else installs and runs without HEAVY."""

HEAVY_FILES = {
    # Imports torch inside the finder, which only ever runs in a process that is importing torchvision.
    "services/common/atoll/common/torchvision_shim.py",
}


@dataclass(frozen=True)
class Import:
    """Example: Import(Path("services/gateway/atoll/gateway/app.py"), 3, "atoll.common.errors")."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def modules() -> list[Path]:
    """Every hand-written module of the distribution, relative to the root."""
    roots = [ROOT / "families", *sorted((ROOT / "services").glob("*"))]
    return [path.relative_to(ROOT) for root in roots for path in sorted(root.glob("atoll/**/*.py"))]


def room_of(path: Path) -> str:
    """The part after "atoll/", e.g. "gateway"."""
    return path.parts[path.parts.index("atoll") + 1]


def imports_of(path: Path) -> Iterator[Import]:
    """Every import statement of a file, those inside functions too."""
    package = path.parts[path.parts.index("atoll") : -1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            # `from atoll import gateway` names the room in the alias.
            yield from (
                Import(path, node.lineno, f"atoll.{alias.name}" if module == "atoll" else module)
                for alias in node.names
            )


def may_use_heavy(path: Path) -> bool:
    inside_families = room_of(path) == "families"
    objective = inside_families and (path.name == "objective.py" or "losses" in path.parts)
    return room_of(path) in HEAVY_ROOMS or objective or str(path) in HEAVY_FILES


def test_the_walk_sees_the_rooms() -> None:
    assert {room_of(path) for path in modules()} <= set(MAY_IMPORT), "a new room needs a line in MAY_IMPORT"
    assert any(found.module == "atoll.common.errors" for path in modules() for found in imports_of(path))


def test_a_room_imports_only_the_rooms_it_may() -> None:
    wrong = [
        str(found)
        for path in modules()
        for found in imports_of(path)
        if found.module.startswith("atoll.")
        and (target := found.module.split(".")[1]) != room_of(path)
        and target not in MAY_IMPORT[room_of(path)]
    ]
    assert not wrong, "a service reaches another one over the wire:\n" + "\n".join(wrong)


def test_only_the_rooms_that_run_models_name_torch() -> None:
    wrong = [
        str(found)
        for path in modules()
        if not may_use_heavy(path)
        for found in imports_of(path)
        if found.module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_only_workers_import_objectives_and_losses() -> None:
    wrong = [
        str(found)
        for path in modules()
        if room_of(path) != "trainer" and not may_use_heavy(path)
        for found in imports_of(path)
        if found.module.startswith("atoll.families.")
        and (found.module.endswith(".objective") or ".losses" in found.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_families_do_not_name_a_backend() -> None:
    wrong = [
        str(found)
        for path in modules()
        if room_of(path) == "families"
        for found in imports_of(path)
        if found.module.split(".")[0] in {"megatron", "ray", "sglang", "slime"}
    ]
    assert not wrong, "\n".join(wrong)


BLOCKER = """
import importlib, importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError(f"{name} is not installed where this module runs")

HEAVY = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Block())
failed = []
for name in sys.argv[2].split(","):
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
sys.exit("\\n".join(failed) or 0)
"""


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("atoll") :]).removesuffix(".__init__")


@pytest.mark.parametrize("room", ["common", "cli", "families", "registry", "gateway", "teacher"])
def test_a_room_without_models_imports_where_torch_is_not_installed(room: str) -> None:
    names = [
        dotted(path)
        for path in modules()
        if room_of(path) == room
        and path.name != "__main__.py"
        and (room == "common" or not may_use_heavy(path))
        # Migrations are run by their tool, which sets up what they read on import.
        and "migrations" not in path.parts
    ]
    assert names, f"no module in {room}"
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, ",".join(sorted(HEAVY)), ",".join(names)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
