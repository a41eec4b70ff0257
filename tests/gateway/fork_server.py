"""Fresh processes for tests that kill them: forked from a small server that has imported the gateway once."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def process_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.gateway.assembly", "atoll.families.grpo", "alembic.command"])
    return context
