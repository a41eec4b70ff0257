"""From settings to a serving engine, and to its end."""

import asyncio
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from atoll.common.engine_client import EngineClient
from atoll.common.errors import AtollError
from atoll.engine.command import sglang_arguments, sglang_environment
from atoll.engine.head import Weights, scenario_head
from atoll.engine.preflight import check_listener, check_model, find_sglang, pick_device
from atoll.engine.process import SglangProcess
from atoll.engine.settings import EngineSettings

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25


async def run(settings: EngineSettings) -> int:
    """Serve until SGLang ends or a signal asks for it; returns the exit status.

    Raises:
        BadConfiguration: the settings cannot work, said before anything is started.
    """
    check_listener(settings)
    sglang = find_sglang()
    weights = await _weights(settings)
    facts = check_model(weights.model_path, sglang)
    device = pick_device(settings.device)
    arguments = sglang_arguments(settings, device, weights.model_path, weights.weight_version, facts)
    log.info("engine starting", device=device.value, arguments=arguments, **weights.log_fields())
    with TemporaryDirectory(prefix="atoll-engine-", ignore_cleanup_errors=True) as scratch:
        environment = sglang_environment(settings, device, os.environ, Path(scratch))
        process = await SglangProcess.start(arguments, environment)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            return await _supervise(process, settings, facts.vocab_size, stop)
        finally:
            process.kill()


async def _weights(settings: EngineSettings) -> Weights:
    if settings.model_path is not None:
        return Weights(settings.model_path.absolute(), settings.weight_version)
    if settings.registry is None or settings.scenario is None:
        raise AssertionError("the settings check this")
    return await scenario_head(settings.registry, settings.scenario, settings.token_text, settings.registry_timeout_s)


async def _supervise(process: SglangProcess, settings: EngineSettings, vocab_size: int, stop: asyncio.Event) -> int:
    ended = asyncio.create_task(process.wait())
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_until_ready(settings, vocab_size))
    try:
        await asyncio.wait({ended, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not ended.done() and not stopped.done():
            if not ready.result():
                process.kill()
                await ended
                return 1
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            log.error("sglang ended by itself", status=ended.result(), output=process.last_lines)
            # An engine that is gone is a failure, whatever SGLang calls it.
            return ended.result() or 1
        await process.stop(settings.stop_timeout_s)
        status = await ended
        log.info("engine stopped", status=status)
        return status
    finally:
        for task in (ready, stopped):
            task.cancel()


async def _until_ready(settings: EngineSettings, vocab_size: int) -> bool:
    """True once the engine has sampled a token, False after the time limit."""
    started = time.monotonic()
    problem = ""
    async with EngineClient(f"http://{_reachable(settings.host)}:{settings.port}", vocab_size) as client:
        while time.monotonic() - started < settings.start_timeout_s:
            try:
                await client.model_info()
                version = await client.weight_version()
            except AtollError as error:
                problem = error.message
                await asyncio.sleep(POLL_SECONDS)
                continue
            seconds = round(time.monotonic() - started, 1)
            log.info("engine ready", weight_version=version, seconds=seconds, port=settings.port)
            return True
    log.error("engine not ready in time", timeout_s=settings.start_timeout_s, problem=problem)
    return False


def _reachable(host: str) -> str:
    """An address to connect to for one to listen on."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
