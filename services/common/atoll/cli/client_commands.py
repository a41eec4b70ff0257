"""The commands that talk to running services: each reads, sends, and prints one thing."""

import asyncio
import json
from collections.abc import Callable
from typing import Annotated

import typer
from atoll.cli import scoring
from atoll.cli.gateway_api import GatewayApi, Object
from atoll.cli.jobs import (
    ENDED,
    ENDED_WELL,
    cancel_job,
    job_view,
    jobs_table,
    read_job,
    read_jobs,
    submit_rollback,
    watch_job,
    why_of,
)
from atoll.cli.refusals import fail, refusals_in_one_line, token_from_environment
from atoll.cli.samples import metadata_of, read_samples, report_line, samples_table, send_report
from atoll.cli.scenarios import read_scenarios, scenario_as_json, scenarios_table
from atoll.cli.scoring import ids_of, scores_as_json, scores_table
from atoll.cli.status import read_status, status_view
from atoll.cli.versions import read_versions, version_as_json, versions_table
from rich.console import Console, RenderableType

Gateway = Annotated[str, typer.Option(envvar="ATOLL_GATEWAY", help="Base URL.")]
Registry = Annotated[str, typer.Option(envvar="ATOLL_REGISTRY", help="host:port.")]
Scenario = Annotated[str | None, typer.Option(envvar="ATOLL_SCENARIO", help="May be left out when there is only one.")]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
Limit = Annotated[int, typer.Option(min=1, help="At most so many, newest first.")]
Watch = Annotated[bool, typer.Option("--watch", help="Stay until the job has ended; status 1 unless it was served.")]

GATEWAY = "http://127.0.0.1:8100"
REGISTRY = "127.0.0.1:7410"
TEACHER = "127.0.0.1:7430"


def add_to(app: typer.Typer) -> None:
    """Makes them commands of the app."""
    for command in (status, scenarios, versions, samples, report, jobs, job, cancel, rollback, score):
        app.command()(command)


def status(gateway: Gateway = GATEWAY, as_json: AsJson = False) -> None:
    """Show what the gateway serves and trains. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        body = asyncio.run(read_status(gateway, token_from_environment()))
    _show(as_json, body, lambda: status_view(body))


def scenarios(registry: Registry = REGISTRY, as_json: AsJson = False) -> None:
    """Show the scenarios with their families and options. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        found = asyncio.run(read_scenarios(registry, token_from_environment()))
    _show(as_json, [scenario_as_json(each) for each in found], lambda: scenarios_table(found))


def versions(scenario: Scenario = None, registry: Registry = REGISTRY, as_json: AsJson = False) -> None:
    """Show the version chain of a scenario, newest first. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        chain = asyncio.run(read_versions(registry, scenario, token_from_environment()))
    _show(as_json, [version_as_json(each) for each in chain], lambda: versions_table(chain))


def samples(
    scenario: Scenario = None,
    state: Annotated[str, typer.Option(help="pending, reserved, consumed or settled.")] = "",
    limit: Limit = 20,
    gateway: Gateway = GATEWAY,
    as_json: AsJson = False,
) -> None:
    """Show recorded samples, newest first, and where they stand. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        found = asyncio.run(read_samples(_api(gateway), scenario, state, limit))
    _show(as_json, found, lambda: samples_table(found))


def report(
    receipts: Annotated[list[str], typer.Argument(help="Several are turns of one rollout, in their order.")],
    score: Annotated[float | None, typer.Option(help="A finite number.")] = None,
    feedback: Annotated[str | None, typer.Option(help="A text, or a JSON object.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value; the value may be JSON. Give it once per key.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(envvar="ATOLL_SCENARIO", help="Else whose receipt it is.")] = None,
    request_id: Annotated[str, typer.Option(help="The same id is the same report.")] = "",
    gateway: Gateway = GATEWAY,
    as_json: AsJson = False,
) -> None:
    """Give feedback on the sample of a receipt. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        answer = asyncio.run(
            send_report(
                _api(gateway),
                receipts,
                scenario=scenario,
                score=score,
                feedback=feedback,
                metadata=metadata_of(metadata or ()),
                request_id=request_id,
            )
        )
    _show(as_json, answer, lambda: report_line(answer))


def jobs(scenario: Scenario = None, limit: Limit = 20, gateway: Gateway = GATEWAY, as_json: AsJson = False) -> None:
    """Show training jobs and rollbacks, newest first. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        found = asyncio.run(read_jobs(_api(gateway), scenario, limit))
    _show(as_json, found, lambda: jobs_table(found))


def job(
    job_id: str,
    scenario: Scenario = None,
    watch: Watch = False,
    gateway: Gateway = GATEWAY,
    as_json: AsJson = False,
) -> None:
    """Show one job: its phase, its metrics, and why it ended. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        api = _api(gateway)
        found = asyncio.run(watch_job(api, scenario, job_id, _progress()) if watch else read_job(api, scenario, job_id))
    _show(as_json, found, lambda: job_view(found))
    _end_with(found, watched=watch)


def cancel(job_id: str, scenario: Scenario = None, gateway: Gateway = GATEWAY, as_json: AsJson = False) -> None:
    """Cancel a job that is not staged yet; its samples form another batch. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        found = asyncio.run(cancel_job(_api(gateway), scenario, job_id))
    _show(as_json, found, lambda: job_view(found))


def rollback(
    scenario: str,
    version: Annotated[int, typer.Argument(min=0, help="The number of a durable version.")],
    request_id: Annotated[str, typer.Option(help="The same id is the same rollback.")] = "",
    watch: Watch = False,
    gateway: Gateway = GATEWAY,
    as_json: AsJson = False,
) -> None:
    """Bring the weights of an earlier version back, as a new version. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        api = _api(gateway)
        found = asyncio.run(_rolled_back(api, scenario, version, request_id, watch))
    _show(as_json, found, lambda: job_view(found))
    _end_with(found, watched=watch)


def score(
    prompt: Annotated[str, typer.Option(help="Token ids, e.g. 5,6,7.")],
    response: Annotated[str, typer.Option(help="Token ids that follow the prompt.")],
    top_k: Annotated[int, typer.Option(min=0, help="Show so many of the teacher's likeliest ids per token.")] = 0,
    teacher: Annotated[str, typer.Option(envvar="ATOLL_TEACHER", help="host:port.")] = TEACHER,
    as_json: AsJson = False,
) -> None:
    """Score token ids with the teacher. The token is read from ATOLL_TOKEN."""
    with refusals_in_one_line():
        ids = ids_of(response, "--response")
        asked = scoring.score(teacher, token_from_environment(), ids_of(prompt, "--prompt"), ids, top_k)
        arrays = asyncio.run(asked)
    _show(as_json, scores_as_json(ids, arrays), lambda: scores_table(ids, arrays))


async def _rolled_back(api: GatewayApi, scenario: str, version: int, request_id: str, watch: bool) -> Object:
    submitted = await submit_rollback(api, scenario, version, request_id)
    return await watch_job(api, scenario, str(submitted["job_id"]), _progress()) if watch else submitted


def _end_with(job: Object, *, watched: bool) -> None:
    if watched and job["state"] in ENDED and job["state"] != ENDED_WELL:
        fail(f"{job['job_id']} was {job['state']}: {why_of(job) or 'without a reason'}", 1)


def _progress() -> Console:
    """Beside what a script reads."""
    return Console(stderr=True, highlight=False)


def _api(gateway: str) -> GatewayApi:
    return GatewayApi(gateway, token_from_environment())


def _show(as_json: bool, content: object, view: Callable[[], RenderableType]) -> None:
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        Console().print(view())
