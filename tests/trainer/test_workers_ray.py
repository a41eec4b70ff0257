"""Ray worker groups: a private Ray goes with its group, a joined one stays, Megatron steps are those of local ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from atoll.trainer.backends import launcher_of
from atoll.trainer.megatron.backend import MegatronBackend
from atoll.trainer.megatron.settings import MegatronSettings, ParallelLayout
from atoll.trainer.settings import TrainerSettings
from atoll.trainer.workers.group import WorkerGroup, WorkerLost, WorkerPlan
from atoll.trainer.workers.ray_loopback import prefer_loopback, refuse_listening_to_others
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from tests.trainer.megatron_support import ModelKind, grpo_binding, grpo_steps, make_rows
from tests.trainer.worker_support import eventually, gone, plan_of

# The clusters that are joined here lie on loopback as well, and want the token that Ray gives to those it starts.
prefer_loopback()
os.environ.setdefault("RAY_AUTH_MODE", "token")

_HEAD = """
import sys
import ray
from atoll.trainer.workers.ray_connection import RayConnection
connection = RayConnection(None, "elsewhere", 2)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
connection.close()
"""
_ASKER = """
import sys, ray
ray.init(address=sys.argv[1], namespace="atoll", log_to_driver=False, configure_logging=False)
bridge = ray.get_actor("atoll-train-bridge")
facts = ray.get(bridge.facts.remote())
print(facts.scenario, facts.address, facts.pid, ray.get(bridge.healthy.remote()))
"""
_OTHER_TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ray
from atoll.trainer.backends import launcher_of
from tests.trainer.test_workers_ray import settings_of
from tests.trainer.worker_support import plan_of
settings = settings_of(Path(sys.argv[1]), workers="ray", RAY_ADDRESS=sys.argv[3], port=7421, scenario=sys.argv[4])
group = launcher_of(settings)(plan_of(1, Path(sys.argv[1])))
print(ray.get(ray.get_actor("atoll-train-bridge").facts.remote()).address)
group.close()
"""
_TRAINER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from atoll.trainer.workers.ray_group import RayWorkerGroup
from tests.trainer.worker_support import plan_of
group = RayWorkerGroup(plan_of(2, Path(sys.argv[1])))
print(*group.pids(), *group.call("start_library_helper", [()] * 2, 60), flush=True)
time.sleep(600)
"""


def settings_of(run_dir: Path, **values: object) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {"scenario": "chat", "registry": "127.0.0.1:1", "gateway": "127.0.0.1:2", "run_dir": run_dir, **values}
    )


def listened_to(known: set[int]) -> set[str]:
    """Addresses that this process and its children take connections at, without the children of other tests."""
    children = psutil.Process().children(recursive=True)
    family = [psutil.Process(), *(child for child in children if child.pid not in known)]
    sockets = [socket for each in family for socket in each.net_connections("inet")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_a_private_ray_that_others_could_reach_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"it would listen on 10\.0\.0\.7"):
        refuse_listening_to_others("10.0.0.7")


_GROUP_OVER_A_HELD_STORE = """
import socket, psutil, torch.distributed as dist
from atoll.trainer.workers.ray_actor import hold_store
store = hold_store("127.0.0.1")
listening = {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections() if c.status == "LISTEN"}
assert listening == {("127.0.0.1", store.port)}, listening
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", store.port))
    except OSError as error:
        print(error.strerror)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store.port}", rank=0, world_size=1)
dist.destroy_process_group()
"""


def test_the_port_of_the_rendezvous_is_taken_from_when_it_is_told_until_the_ranks_meet_there() -> None:
    done = subprocess.run([sys.executable, "-c", _GROUP_OVER_A_HELD_STORE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Address already in use\n"), done.stderr


def test_a_private_ray_goes_with_its_group_and_the_kill_of_a_rank_is_reported(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    group = launcher_of(settings_of(tmp_path, workers="ray"))(plan_of(2, tmp_path))
    try:
        assert group.call("add", [(1,), (2,)], 30) == [8, 109]
        assert group.alive()
        assert listened_to(before) == {"127.0.0.1", "::ffff:127.0.0.1"}
        with pytest.raises(WorkerLost, match="rank 1 died") as lost:
            group.call("kill_self_on", [(1, "last words")] * 2, 60)
        assert "last words" in lost.value.log_tail
        assert not group.alive()
    finally:
        group.close()
    with pytest.raises(WorkerLost, match="closed"):
        group.call("add", [(1,), (2,)], 30)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert eventually(lambda: all(gone(child.pid) for child in left))


def test_ray_is_imported_only_where_it_is_chosen(tmp_path: Path) -> None:
    code = "import sys, atoll.trainer.driver, atoll.trainer.workers.local; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_cluster_that_is_joined_outlives_the_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HEAD]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    try:
        address = head.stdout.readline().strip()
        launch = launcher_of(settings_of(tmp_path, workers="ray", RAY_ADDRESS=address))
        for _ in range(2):
            group = launch(plan_of(2, tmp_path))
            pid = group.call("process_id", [()] * 2, 30)[0]
            assert isinstance(pid, int)
            assert head.pid in {parent.pid for parent in psutil.Process(pid).parents()}
            group.close()
            assert eventually(lambda: gone(pid))  # noqa: B023
            assert head.poll() is None
    finally:
        head.communicate("", timeout=60)


@pytest.mark.slow
def test_a_joined_cluster_has_the_drivers_bridge_as_long_as_its_workers_or_until_the_next_holder_takes_it_over(
    tmp_path: Path,
) -> None:
    head = subprocess.Popen([sys.executable, "-c", _HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    health, server = HealthServicer(), grpc.server(ThreadPoolExecutor(1))
    add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        address = head.stdout.readline().strip()

        def run(code: str, *words: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

        group = launcher_of(settings_of(tmp_path, workers="ray", RAY_ADDRESS=address, port=port))(plan_of(1, tmp_path))
        told = run(_ASKER, address)
        assert told.stdout.split() == ["chat", f"127.0.0.1:{port}", str(os.getpid()), "True"], told.stderr
        health.set("", HealthCheckResponse.NOT_SERVING)
        assert run(_ASKER, address).stdout.split()[-1] == "False"
        words = (str(tmp_path / "other"), str(Path(__file__).parents[2]), address)
        second = run(_OTHER_TRAINER, *words, "another")
        assert (
            f"driver of scenario chat at 127.0.0.1:{port} has published the actor atoll-train-bridge" in second.stderr
        )
        assert run(_ASKER, address).stdout.split()[:2] == ["chat", f"127.0.0.1:{port}"]
        standby = run(_OTHER_TRAINER, *words, "chat")
        assert "127.0.0.1:7421" in standby.stdout.splitlines(), standby.stderr
        assert group.call("add", [(1,)], 30) == [8]
        assert "ValueError" in run(_ASKER, address).stderr, "it went with the driver that had it last"
        group.close()
    finally:
        server.stop(None)
        head.communicate("", timeout=60)


@pytest.mark.slow
def test_a_private_ray_dies_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TRAINER, str(tmp_path), str(Path(__file__).parents[2])]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    ranks = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(ranks) == 4
    pids = [*ranks, *(child.pid for child in psutil.Process(trainer.pid).children(recursive=True))]
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    # Agents of Ray look now and then whether their node is still there.
    assert eventually(lambda: all(gone(pid) for pid in pids), 120)


@pytest.mark.slow
def test_steps_on_two_tensor_parallel_actors_are_those_of_two_processes(
    tiny_model: Callable[[ModelKind], Path], tmp_path: Path
) -> None:
    def trained(launch: Callable[[WorkerPlan], WorkerGroup]) -> tuple[Mapping[str, float], ...]:
        backend = MegatronBackend(MegatronSettings(ParallelLayout(tensor=2)), launch, tmp_path / "logs")
        try:
            backend.load(tiny_model(ModelKind("qwen3")), None, None)
            binding = grpo_binding()
            steps = grpo_steps(make_rows(), binding)
            report = backend.train(binding, [*steps, *steps], [1e-3] * (2 * len(steps)))
            backend.stage(None, tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}", b"state")
            return report.metrics
        finally:
            backend.close()

    local = trained(launcher_of(settings_of(tmp_path)))
    assert local[0] != local[1]
    assert trained(launcher_of(settings_of(tmp_path, workers="ray"))) == local
