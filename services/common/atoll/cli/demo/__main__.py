"""`make demo`: serve a small model, chat with it, reward its replies, and watch the versions get better.

DEMO_MODEL=smollm2 (the default) answers English and takes 6 to 8 minutes; DEMO_MODEL=tiny babbles and takes under 3.
DEMO_SEED=<n> repeats the tiny model of an earlier run. The last line is for machines:

    demo: ok versions=<n> reward_first=<x> reward_last=<y>
"""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

import openai
from atoll.cli.demo.gateway import DemoFailed, Gateway
from atoll.cli.demo.loop import DemoResult, result_table, run_loop
from atoll.cli.demo.profiles import PROFILES, SMOLLM2, Profile
from atoll.cli.main import show_event
from atoll.cli.ports import free_ports
from atoll.cli.processes import hold_run_dir
from atoll.cli.serve import StackFailed, cancelled_by_signals, run_stack
from atoll.cli.stack_file import Stack, find_stack, load_stack
from atoll.common.errors import BadConfiguration
from rich.console import Console
from rich.markup import escape

ROOT = Path(".atoll/demo")
STACK = "local-cpu"
SCENARIO = "demo"
PORT_NAMES = ("registry", "engine", "gateway", "gateway_grpc", "trainer")
SEED_LIMIT = 1_000_000


def main() -> int:
    """The exit status: 0 only when every job became a served version."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    name = os.environ.get("DEMO_MODEL") or SMOLLM2.name
    if name not in PROFILES:
        print(f"demo: DEMO_MODEL is {name!r}, expected one of {', '.join(PROFILES)}", file=sys.stderr)
        return 2
    profile = PROFILES[name]
    run_dir = (ROOT / profile.name).absolute()
    try:
        return asyncio.run(_run(profile, run_dir, console))
    except asyncio.CancelledError:
        print("demo: stopped", file=sys.stderr)
        return 130
    except (BadConfiguration, StackFailed, DemoFailed, openai.APIError) as error:
        print(f"demo: failed: {error}\ndemo: logs are in {run_dir / 'logs'}", file=sys.stderr)
        return 1


async def _run(profile: Profile, run_dir: Path, console: Console) -> int:
    began = time.monotonic()
    console.rule(f"[bold]Atoll demo[/bold]: {profile.title}", align="left")
    console.print(
        f"{profile.jobs} training jobs of {profile.samples_per_job} replies each, about {profile.minutes}.\n"
        f"Rewarded is {profile.rewarded}."
    )
    with cancelled_by_signals():
        with hold_run_dir(run_dir):
            _clear(run_dir)
        model = await _make_model(profile, run_dir)
        stack, gateway_url = _load(profile, run_dir, model)
        result, chain = await run_stack(
            stack, lambda: _work(gateway_url, profile, console), lambda event: show_event(console, event)
        )
    console.print(result_table(result, chain))
    console.print(f"\n[bold]{escape(result.question)}[/bold]")
    console.print(f"  version 0:  {escape(repr(result.before))}")
    console.print(f"  version {len(chain) - 1}: {escape(repr(result.after))}")
    console.print(f"\n{time.monotonic() - began:.0f} s; logs and the store are in {run_dir}")
    if len(chain) != profile.jobs + 1:
        raise DemoFailed(f"the chain has {len(chain)} versions, expected {profile.jobs + 1}")
    print(f"demo: ok versions={len(chain)} reward_first={result.reward_first:.3f} reward_last={result.reward_last:.3f}")
    return 0


async def _work(gateway_url: str, profile: Profile, console: Console) -> tuple[DemoResult, list[dict[str, object]]]:
    console.print(f"[bold]serving[/bold] at {gateway_url}/v1; training starts")
    async with Gateway(gateway_url, SCENARIO, os.environ.get("ATOLL_TOKEN")) as gateway:
        return await run_loop(gateway, profile, console), await gateway.versions()


def _clear(run_dir: Path) -> None:
    """Removes what the last run left; its stack.pid is held by this process."""
    for path in run_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "stack.pid":
            path.unlink()


async def _make_model(profile: Profile, run_dir: Path) -> Path:
    """The model's directory. It is made by a process of its own: this one never loads torch. Raises DemoFailed."""
    out = run_dir / "model"
    seed = os.environ.get("DEMO_SEED") or str(time.time_ns() % SEED_LIMIT)
    arguments = ["--out", str(out), *(["--seed", seed] if profile.name == "tiny" else [])]
    maker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll.engine.models", profile.name, *arguments),
        # The maker says what it does; the bars of the libraries under it say it again, several times.
        env={**os.environ, "TQDM_DISABLE": "1"},
    )
    try:
        status = await maker.wait()
    except asyncio.CancelledError:
        maker.terminate()
        await maker.wait()
        raise
    if status != 0:
        raise DemoFailed(f"the model {profile.name} could not be made (status {status}); the reason is above")
    return out


def _load(profile: Profile, run_dir: Path, model: Path) -> tuple[Stack, str]:
    """The bundled stack on free ports, and the gateway's URL."""
    ports = dict(zip(PORT_NAMES, free_ports(len(PORT_NAMES)), strict=True))
    groups, size = len(profile.questions), profile.samples_per_question
    overrides = [
        ("run_dir", str(run_dir)),
        ("vars.model", str(model)),
        ("vars.scenario", SCENARIO),
        ("vars.options", f"{{groups_per_step: {groups}, n_samples_per_prompt: {size}}}"),
        *((f"vars.{name}", value) for name, value in profile.stack_vars.items()),
        *((f"vars.ports.{name}", str(port)) for name, port in ports.items()),
    ]
    return load_stack(find_stack(STACK), overrides), f"http://127.0.0.1:{ports['gateway']}"


if __name__ == "__main__":
    sys.exit(main())
