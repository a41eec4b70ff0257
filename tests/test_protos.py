"""The generated stubs are those of the .proto files, and the contract never breaks a client that was built before."""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
RELEASED = PROTOS / "released" / "v1.binpb"
BIN = Path(sys.executable).parent


def buf(*arguments: str | Path, cwd: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "buf"), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def files_under(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_committed_stubs_are_what_the_generator_makes(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts/generate-protos"), str(tmp_path)],
        env={**os.environ, "ATOLL_BIN": os.path.relpath(BIN, ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fresh, committed = tmp_path / "atoll", PROTOS / "gen" / "atoll"
    names = files_under(fresh)
    assert len(names) > 20
    assert names == files_under(committed), "run scripts/generate-protos and commit what it changes"
    _, different, unreadable = filecmp.cmpfiles(fresh, committed, names, shallow=False)
    assert not different + unreadable, "run scripts/generate-protos and commit what it changes"


def test_the_contracts_pass_the_linter() -> None:
    done = buf("lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_contract_breaks_the_released_one() -> None:
    """protos/README.md says when and how the released image is replaced."""
    done = buf("breaking", "--against", RELEASED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_against_the_released_contract_sees_a_removed_field(tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy, ignore=shutil.ignore_patterns("gen", "released"))
    report = copy / "atoll/api/gateway/v1/report.proto"
    kept = [line for line in report.read_text().splitlines() if "optional double score" not in line]
    report.write_text("\n".join(kept) + "\n")
    done = buf("breaking", "--against", RELEASED, cwd=copy)
    assert done.returncode != 0
    assert "score" in done.stdout
