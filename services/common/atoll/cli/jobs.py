"""`atoll jobs`, `job`, `cancel` and `rollback`: training jobs with their phases, metrics and reasons."""

import asyncio
from collections.abc import Mapping

from atoll.cli.gateway_api import GatewayApi, Json, Object, job_path, scenario_path
from atoll.common.errors import Unavailable
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

PHASES = ("submitted", "admitted", "scored", "prepared", "running", "staged", "committed", "served")
"""In their order; a job that ends before the last one has a reason."""

ENDED_WELL = "served"
ENDED = frozenset({ENDED_WELL, "dropped", "refused", "failed", "cancelled"})
POLL_SECONDS = 0.5


async def read_jobs(api: GatewayApi, scenario: str | None, limit: int) -> list[Object]:
    """The newest jobs of a scenario, newest first."""
    return await api.items(scenario_path(await api.scenario(scenario), "jobs"), "jobs", limit)


async def read_job(api: GatewayApi, scenario: str | None, job_id: str) -> Object:
    return await api.get(job_path(await api.scenario(scenario), job_id))


async def cancel_job(api: GatewayApi, scenario: str | None, job_id: str) -> Object:
    """The cancelled job."""
    return await api.post(f"{job_path(await api.scenario(scenario), job_id)}/cancel", {})


async def submit_rollback(api: GatewayApi, scenario: str, version: int, request_id: str) -> Object:
    """The queued job. The same request id is the same rollback."""
    return await api.post(scenario_path(scenario, "rollback"), {"version": version, "request_id": request_id})


def jobs_table(jobs: list[Object]) -> Table:
    """One row a job."""
    table = Table(title=f"jobs of {jobs[0]['scenario']}" if jobs else "no jobs", title_justify="left")
    for column in ("job", "kind", "state", "version", "attempt", "samples", "updated", "why"):
        right = column in ("version", "attempt", "samples")
        # An id is there to be copied.
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "job")
    for job in jobs:
        samples = job["samples"]
        table.add_row(
            str(job["job_id"]),
            f"rollback to {job['restores']}" if job["kind"] == "rollback" else str(job["kind"]),
            str(job["state"]),
            _text(job["version"]),
            _text(job["attempt"]),
            str(len(samples)) if isinstance(samples, list) and samples else "-",
            str(job["updated_at"] or "-")[:19].replace("T", " "),
            why_of(job) or "-",
        )
    return table


def job_view(job: Object) -> RenderableType:
    """Everything about one job: its facts, and its metrics by name."""
    facts = Table(title=str(job["job_id"]), title_justify="left", show_header=False)
    for key, value in job.items():
        if key not in ("job_id", "metrics", "samples"):
            facts.add_row(key.replace("_", " "), _text(value))
    samples = job["samples"]
    if isinstance(samples, list) and samples:
        facts.add_row("samples", str(len(samples)))
    metrics = job["metrics"]
    if not isinstance(metrics, Mapping) or not metrics:
        return facts
    table = Table(title="metrics", title_justify="left", show_header=False)
    for name in sorted(metrics):
        table.add_row(name, _text(metrics[name]))
    return Group(facts, table)


def why_of(job: Object) -> str:
    """Why a job ended without a version, or waits. Example: "stale_sample: produced by 1:0" """
    return ": ".join(str(part) for part in (job["reason"], job["message"]) if part)


async def watch_job(api: GatewayApi, scenario: str | None, job_id: str, console: Console) -> Object:
    """Shows a bar over the phases until the job has ended, and returns it. A gateway that is away is waited for, once
    the job has been seen."""
    name = await api.scenario(scenario)
    path = job_path(name, job_id)
    job = await api.get(path)
    with _bar(console) as progress:
        shown = progress.add_task("", total=len(PHASES), why="")
        seen = ""
        while True:
            _show(progress, shown, job)
            if not console.is_terminal and job["state"] != seen:
                seen = str(job["state"])
                console.print(f"{job_id} {seen}" + (f" ({why_of(job)})" if why_of(job) else ""))
            if job["state"] in ENDED:
                return job
            await asyncio.sleep(POLL_SECONDS)
            try:
                job = await api.get(path)
            except Unavailable as error:
                progress.update(shown, why=error.message)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[why]}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _show(progress: Progress, task: TaskID, job: Object) -> None:
    state = str(job["state"])
    # A job that waits, or ended without a version, stays where the bar was.
    reached = {"completed": float(PHASES.index(state) + 1)} if state in PHASES else {}
    progress.update(task, description=state, why=why_of(job), **reached)  # type: ignore[arg-type]


def _text(value: Json) -> str:
    if value in (None, "", [], {}):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
