"""Identifiers and resource names. Names are opaque to clients: only this module builds them."""

import re
import uuid

from atoll.common.errors import InvalidInput

_ID = re.compile(r"[a-z0-9-]{1,63}")


def check_id(value: str, field: str) -> str:
    """Returns the id, or raises InvalidInput when it is not 1 to 63 lower-case letters, digits and hyphens."""
    if not _ID.fullmatch(value):
        shown = value if len(value) <= 80 else value[:80] + "..."
        raise InvalidInput(f"{field} is {shown!r}, expected 1 to 63 lower-case letters, digits or hyphens", field=field)
    return value


def new_id() -> str:
    """A fresh random id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def scenario_name(scenario: str) -> str:
    return f"scenarios/{scenario}"


def version_name(scenario: str, number: int) -> str:
    return f"scenarios/{scenario}/versions/{number}"


def sample_name(scenario: str, receipt: str) -> str:
    return f"scenarios/{scenario}/samples/{receipt}"


def report_name(scenario: str, report_id: str) -> str:
    return f"scenarios/{scenario}/reports/{report_id}"


def job_name(scenario: str, job_id: str) -> str:
    return f"scenarios/{scenario}/jobs/{job_id}"


def artifact_name(digest: str) -> str:
    return f"artifacts/{digest}"
