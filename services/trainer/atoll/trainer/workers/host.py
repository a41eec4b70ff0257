"""Holds a rank's object and turns messages into answers, in whatever process that happens."""

from __future__ import annotations

import importlib
import sys
import traceback
from operator import methodcaller

from atoll.trainer.workers.group import WorkerRefusal
from atoll.trainer.workers.messages import Answer, Call, Raised, Refused, Returned, Start


class WorkerHost:
    """Takes a `Start` first, then one `Call` at a time."""

    def __init__(self) -> None:
        self._worker: object = None

    def answer(self, message: object) -> Answer:
        """Never raises an `Exception`: a traceback goes to the log."""
        answer: Answer
        try:
            if isinstance(message, Start):
                module, _, name = message.target.partition(":")
                self._worker = vars(importlib.import_module(module))[name](message.place, **message.arguments)
                answer = Returned(None)
            elif isinstance(message, Call):
                answer = Returned(methodcaller(message.method, *message.arguments)(self._worker))
            else:
                raise TypeError(f"expected Start or Call, got {type(message).__name__}")
        except WorkerRefusal as refusal:
            answer = Refused(refusal)
        except Exception as error:
            traceback.print_exc()
            answer = Raised(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        return answer
