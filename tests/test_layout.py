"""The repository stays readable and portable: small files, no stray packages, no trace of one machine."""

import re
import subprocess
from functools import cache
from pathlib import Path

from atoll.api.errors.v1 import errors_pb2
from atoll.api.errors.v1.errors_pb2 import Reason
from atoll.common.errors import REASON_PREFIX, STATUS_OF_REASON

ROOT = Path(__file__).resolve().parents[1]

MAX_LINES = 300
LONGER: dict[str, int] = {}
"""Files over MAX_LINES and how long they may be. Entries only shrink and go; the test fails when one is out of date."""

READABLE = {".py", ".proto", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".js", ".mjs", ".sh", ".cfg", ".ini", ""}

# Spelled in pieces so that this file passes its own test.
REGISTRY_HOSTS = re.compile(
    "|".join(
        re.escape(host)
        for host in (
            "pypi." + "org",
            "pythonhosted." + "org",
            "npmjs." + "org",
            "npmjs." + "com",
            "yarnpkg." + "com",
            "docker." + "io",
            "ghcr." + "io",
            "hugging" + "face.co",
        )
    )
    + "|index-"
    + "url|npm_config_"
    + "registry",
)
MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:" + "|".join(("work", "root", "home", "tmp/atoll", "Users")) + r")/\w")


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that git tracks or would track; in an unpacked archive without git, all but hidden and cache folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [Path(line) for line in listed.stdout.splitlines()]
    else:
        skip = {".venv", "node_modules", "__pycache__", ".atoll", ".git"}
        names = [
            path.relative_to(ROOT)
            for path in ROOT.rglob("*")
            if path.is_file() and not skip & set(path.relative_to(ROOT).parts)
        ]
    return tuple(name for name in names if (ROOT / name).is_file())


def hand_written(name: Path) -> bool:
    return not name.is_relative_to("protos/gen") and name.name not in {"package-lock.json", "LICENSE"}


def text_of(name: Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace") if name.suffix in READABLE else ""


def test_no_root_has_an_init_file_that_would_hide_the_others() -> None:
    stray = [str(name) for name in repository_files() if name.parts[-2:] == ("atoll", "__init__.py")]
    assert not stray, f"{stray}: atoll is a namespace that eight roots share; remove the file"


def test_files_are_short_enough_to_read() -> None:
    lengths = {
        str(name): text_of(name).count("\n")
        for name in repository_files()
        if name.suffix in {".py", ".proto", ".js", ".mjs"} and hand_written(name)
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, MAX_LINES)}
    assert not too_long, f"over {MAX_LINES} lines (split them by what they are about): {too_long}"
    outdated = {name: limit for name, limit in LONGER.items() if lengths.get(name, 0) <= MAX_LINES}
    assert not outdated, f"short enough now, take them off the list: {outdated}"


def test_no_file_names_a_package_registry() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name in repository_files()
        if name.name != "LICENSE"
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if REGISTRY_HOSTS.search(line)
    ]
    assert not found, "the tools know their registries by their own configuration:\n" + "\n".join(found)


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name in repository_files()
        if hand_written(name)
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_search_for_paths_and_registries_finds_what_it_should() -> None:
    assert MACHINE_PATHS.search("cd " + "/home" + "/me") and MACHINE_PATHS.search('"' + "/root" + '/x"')
    assert not MACHINE_PATHS.search("frame" + "work/x") and not MACHINE_PATHS.search("${HOME}" + "/work" + "/x")
    assert REGISTRY_HOSTS.search("https://registry.np" + "mjs.org/x")


def test_every_reason_has_a_status() -> None:
    missing = [
        Reason.Name(value)
        for value in Reason.values()
        if value != errors_pb2.REASON_UNSPECIFIED and value not in STATUS_OF_REASON
    ]
    assert not missing, f"{missing}: add a line to STATUS_OF_REASON"


def test_the_comment_of_every_reason_says_the_status_it_travels_as() -> None:
    """The .proto file is what clients read; the table is what they get."""
    proto = (ROOT / "protos/atoll/api/errors/v1/errors.proto").read_text()
    comments = re.findall(r"((?:^  //.*\n)+)  (REASON_\w+) = (\d+);", proto, re.MULTILINE)
    assert {name for _, name, _ in comments} == set(Reason.keys()), "every reason needs a comment"
    wrong = []
    for comment, name, number in comments:
        status = STATUS_OF_REASON.get(Reason.Value(name))
        assert Reason.Value(name) == int(number)
        if status is None or name == f"{REASON_PREFIX}BAD_CONFIGURATION":
            continue
        said = re.search(r"([A-Z_]{5,}), (\d{3})\b", comment)
        if said is None or (said[1], int(said[2])) != (status.grpc.name, status.http):
            wrong.append(f"{name}: says {said and said[0]!r}, travels as {status.grpc.name}, {status.http}")
    assert not wrong, "\n".join(wrong)
