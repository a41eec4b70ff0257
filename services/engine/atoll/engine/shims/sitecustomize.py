"""Runs at the start of every process of SGLang on a CPU machine: `atoll.engine` puts this folder on its PYTHONPATH."""

import os
import signal

from atoll.common import torchvision_shim
from atoll.engine import die_with_parent

torchvision_shim.install()
# SGLang's workers ask for this themselves, but only after importing for ten seconds: a parent killed before that would
# leave them behind.
die_with_parent.arm(signal.SIGKILL, os.getppid())
