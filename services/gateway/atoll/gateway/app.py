"""The gateway's HTTP routes. A handler reads the request, calls one thing, and shapes the answer."""

from dataclasses import asdict

import orjson
from atoll.gateway.assembly import Gateway
from atoll.gateway.chat import ChatAnswerer
from atoll.gateway.chat_request import ChatPreparer
from atoll.gateway.conversations import Conversations
from atoll.gateway.engine_pool import EnginePool
from atoll.gateway.http_errors import install_error_handlers
from atoll.gateway.jobs import CancelRequest, Jobs, RollbackRequest, job_as_json
from atoll.gateway.middleware import BodyLimit, ChatLimit, Defects, TokenCheck
from atoll.gateway.openai_schema import ChatRequest
from atoll.gateway.registry_reader import RegistryReader
from atoll.gateway.renderers import Renderers
from atoll.gateway.report_request import ReportRequest, read_report, report_reply
from atoll.gateway.sample_listing import sample_as_json, sample_state
from atoll.gateway.scenario_choice import HEADER, choose_scenario, known_scenario
from atoll.gateway.settings import GatewaySettings
from atoll.gateway.status import status_reply
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.middleware import Middleware


def build_app(settings: GatewaySettings, gateway: Gateway, engines: EnginePool) -> FastAPI:
    """The application; serving it, and starting and stopping what it calls, is the caller's."""
    registry = RegistryReader(gateway.registry)
    preparer = ChatPreparer(
        gateway.scenarios,
        gateway.receipts,
        registry,
        Renderers(registry),
        Conversations(gateway.database),
        engines,
        settings.default_scenario,
        settings.capture_top_k,
    )
    answerer = ChatAnswerer(preparer, engines, gateway.writer, settings.request_timeout_s)
    jobs = Jobs(gateway.trainers)
    app = FastAPI(
        title="Atoll gateway",
        docs_url=None,
        redoc_url=None,
        # The first sees the request first.
        middleware=[
            Middleware(Defects),
            Middleware(TokenCheck, token=settings.token_text),
            Middleware(ChatLimit, most=settings.max_chats),
            Middleware(BodyLimit),
        ],
    )
    install_error_handlers(app)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest), summary="Answers a chat and records it")
    async def chat_completions(request: Request) -> Response:
        return await answerer.answer(request)

    @app.get("/v1/models", summary="Lists the scenarios")
    async def models() -> Response:
        entries = [_model(scenario.scenario_id) for scenario in await gateway.scenarios.list()]
        return _json({"object": "list", "data": entries})

    @app.get("/v1/models/{model}", summary="Tells whether a scenario exists")
    async def model(model: str) -> Response:
        choice = choose_scenario(None, model, None)
        return _json(_model(await known_scenario(choice, gateway.scenarios)))

    @app.post("/atoll/report", openapi_extra=_body_of(ReportRequest), summary="Records feedback about samples")
    async def report(request: Request) -> Response:
        asked = await read_report(
            await request.body(),
            request.headers.get(HEADER),
            settings.default_scenario,
            gateway.scenarios,
            gateway.receipts,
        )
        return _json(report_reply(await gateway.reports.create(asked)))

    @app.get("/healthz", summary="Tells that the process serves; needs no token")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/atoll/status", summary="Scenarios, queues, engines, and the last training error")
    async def status() -> Response:
        return _json(await status_reply(gateway.training, gateway.scenarios, engines))

    @app.get("/atoll/scenarios/{scenario}/versions", summary="The version chain, newest first")
    async def versions(scenario: str, page_size: int = 0, page_token: str = "") -> Response:
        page, next_token = await registry.versions(scenario, page_size, page_token)
        return _json(
            {
                "scenario": scenario,
                "versions": [{**asdict(v), "created_at": v.created_at.isoformat()} for v in page],
                "next_page_token": next_token,
            }
        )

    @app.get("/atoll/scenarios/{scenario}/samples", summary="Recorded samples without their tensors, newest first")
    async def samples(scenario: str, state: str = "", page_size: int = 0, page_token: str = "") -> Response:
        name = (await gateway.scenarios.get(scenario)).scenario_id
        page, next_token = await gateway.samples.page(name, sample_state(state), page_size, page_token)
        return _json(
            {"scenario": name, "samples": [sample_as_json(each) for each in page], "next_page_token": next_token}
        )

    @app.get("/atoll/scenarios/{scenario}/jobs", summary="Training jobs and rollbacks, newest first")
    async def list_jobs(scenario: str, page_size: int = 0, page_token: str = "") -> Response:
        found, next_token = await jobs.list(scenario, page_size, page_token)
        return _json({"scenario": scenario, "jobs": [job_as_json(job) for job in found], "next_page_token": next_token})

    @app.get("/atoll/scenarios/{scenario}/jobs/{job_id}", summary="One job: its phase, metrics and reason")
    async def one_job(scenario: str, job_id: str) -> Response:
        return _json(job_as_json(await jobs.get(scenario, job_id)))

    @app.post(
        "/atoll/scenarios/{scenario}/jobs/{job_id}/cancel",
        openapi_extra=_body_of(CancelRequest),
        summary="Cancels a job that is not staged yet",
    )
    async def cancel(scenario: str, job_id: str, request: Request) -> Response:
        return _json(job_as_json(await jobs.cancel(scenario, job_id, await request.body())))

    @app.post(
        "/atoll/scenarios/{scenario}/rollback",
        openapi_extra=_body_of(RollbackRequest),
        summary="Brings the weights of an earlier version back, as a new version",
    )
    async def rollback(scenario: str, request: Request) -> Response:
        return _json(job_as_json(await jobs.rollback(scenario, await request.body())))

    return app


def _model(scenario: str) -> dict[str, object]:
    return {"id": scenario, "object": "model", "created": 0, "owned_by": "atoll"}


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _body_of(schema: type[BaseModel]) -> dict[str, object]:
    """Bodies are read by hand, to refuse what is wrong in our own words; this tells /openapi.json their shape."""
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
