"""Runs at the start of every process of SGLang on a CPU machine: `atoll.engine` puts this folder on its PYTHONPATH."""

import ctypes
import os
import signal

from atoll.common import torchvision_shim

_PR_SET_PDEATHSIG = 1

torchvision_shim.install()

# SGLang's workers ask for this themselves, but only after importing for several seconds: killed before that, the parent
# would leave them behind.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == 1 and os.environ.get("ATOLL_ENGINE_LAUNCHER_PID") not in (None, "1"):
    os.kill(os.getpid(), signal.SIGKILL)
