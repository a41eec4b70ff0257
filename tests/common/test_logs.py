"""Log lines of a process, whichever thread writes them."""

import json
import subprocess
import sys

PROGRAM = """
import logging
import threading

import structlog
from atoll.common.logs import configure_logging

configure_logging("gateway", "info")
log = structlog.get_logger("atoll")


def work():
    log.info("from a thread", receipt="4f0c")
    logging.getLogger("library").warning("from %s", "a library")


with structlog.contextvars.bound_contextvars(scenario="math"):
    log.info("from the loop")
    log.debug("not asked for")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_every_line_is_json_and_names_its_service() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    loop, thread, library = [json.loads(line) for line in output.splitlines()]
    assert {line["service"] for line in (loop, thread, library)} == {"gateway"}
    assert (loop["event"], loop["scenario"], loop["level"]) == ("from the loop", "math", "info")
    assert (thread["event"], thread["receipt"]) == ("from a thread", "4f0c")
    assert (library["event"], library["level"]) == ("from a library", "warning")
