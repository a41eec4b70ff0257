"""A real PostgreSQL server for tests, on a Unix socket in a directory of its own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

START_SECONDS = 60.0
_SYSTEM = "/usr/lib/postgresql"


@dataclass(frozen=True)
class PostgresServer:
    """A server that accepts everybody. Example: url = server.create("registry"); Database(url); server.drop(url)."""

    directory: Path
    pid: int

    def url(self, name: str) -> str:
        """The SQLAlchemy URL of a database."""
        return f"postgresql://postgres@/{name}?host={self.directory}"

    def create(self, name: str, template: str = "template1") -> str:
        """Makes a database, as a copy of another one that nobody is connected to, and returns its URL."""
        self.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return self.url(name)

    def drop(self, name: str) -> None:
        """Removes a database, whoever is connected to it."""
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def execute(self, statement: sql.SQL | sql.Composed) -> None:
        """Runs a statement that belongs to no database of a test."""
        with psycopg.connect(host=str(self.directory), user="postgres", dbname="postgres", autocommit=True) as one:
            one.execute(statement)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Starts a server on fresh data and removes both in the end. Skips the test where PostgreSQL is not installed."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (no initdb on the path or under /usr/lib/postgresql)")
    # Not pytest's directory: the server cannot run as root, and that directory is root's alone.
    directory = Path(tempfile.mkdtemp(prefix="atoll-postgres-"))
    as_user = _unprivileged(directory)
    try:
        data = directory / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            **as_user,
        )
        with (directory / "log").open("w") as log:
            options = ("listen_addresses=", "fsync=off", "max_connections=300")
            server = subprocess.Popen(
                [
                    str(programs / "postgres"),
                    *("-D", str(data), "-k", str(directory)),
                    *(word for option in options for word in ("-c", option)),
                ],
                stdout=log,
                stderr=log,
                text=True,
                cwd=directory,
                **as_user,
            )
        try:
            running = PostgresServer(directory, server.pid)
            _wait_until_ready(running, server)
            yield running
        finally:
            server.send_signal(signal.SIGINT)  # its fast shutdown
            server.wait(30)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _programs() -> Path | None:
    """The directory of initdb and postgres."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = sorted(Path(_SYSTEM).glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return installed[-1].parent if installed else None


def _unprivileged(directory: Path) -> dict[str, Any]:
    """How to start the programs, which refuse to run as root; gives them the directory."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _wait_until_ready(server: PostgresServer, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return server.execute(sql.SQL("SELECT 1"))
        except psycopg.OperationalError:
            log = (server.directory / "log").read_text()
            assert process.poll() is None, f"PostgreSQL ended while it started: {log}"
            assert time.monotonic() < deadline, f"PostgreSQL did not start: {log}"
            time.sleep(0.05)
