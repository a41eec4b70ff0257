"""Ties the life of a process to its parent's, on Linux.

`python -m atoll.engine.die_with_parent PARENT_PID PROGRAM ARGUMENTS...` becomes the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def arm(signal_number: signal.Signals, parent: int) -> None:
    """Have the kernel send the signal to this process when its parent is gone, and now when it is gone already.

    An exec keeps the wish, a fork does not.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal_number)


if __name__ == "__main__":
    arm(signal.SIGKILL, int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
