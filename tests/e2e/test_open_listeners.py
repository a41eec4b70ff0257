"""No service listens where other machines can connect unless it asks them for a token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = "127.0.0.1:1"
"""Nothing listens there: a service must refuse before it waits for anybody."""


def settings_of(service: str, folder: Path) -> dict[str, str]:
    """What each service needs besides its host."""
    return {
        "registry": {"PORT": "0", "STORE": f"{folder}/store"},
        "gateway": {"PORT": "0", "GRPC_PORT": "0", "REGISTRY": NOBODY, "DATABASE_URL": f"sqlite:///{folder}/g.db"},
        "teacher": {"PORT": "0", "ENGINES": f'["http://{NOBODY}"]'},
        "engine": {"PORT": "1024", "MODEL_PATH": str(folder)},
        "trainer": {
            "PORT": "0",
            "SCENARIO": "demo",
            "REGISTRY": NOBODY,
            "GATEWAY": NOBODY,
            "ENGINES": f'["http://{NOBODY}"]',
            "RUN_DIR": str(folder),
        },
    }[service]


@pytest.mark.parametrize("service", ["registry", "gateway", "teacher", "engine", "trainer"])
def test_a_service_that_others_could_reach_without_a_token_does_not_start(service: str, tmp_path: Path) -> None:
    settings = {"HOST": "0.0.0.0", **settings_of(service, tmp_path)}
    module = "atoll.trainer.driver" if service == "trainer" else f"atoll.{service}"
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        | {f"ATOLL_{service.upper()}_{name}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"ATOLL_{service.upper()}_HOST is '0.0.0.0'" in done.stderr
    assert "token" in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was made either"
