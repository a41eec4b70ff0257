"""`python -m atoll.engine`: one engine, configured by environment variables."""

import argparse
import asyncio
import os
import signal
import sys

from atoll.common.errors import BadConfiguration
from atoll.common.logs import configure_logging
from atoll.common.settings import load_settings
from atoll.engine import die_with_parent
from atoll.engine.run import run
from atoll.engine.settings import EngineSettings


def _help() -> str:
    lines = ["Settings (environment variables):"]
    for name, field in EngineSettings.model_fields.items():
        variable = field.validation_alias or f"ATOLL_ENGINE_{name.upper()}"
        lines.append(f"  {variable}={field.default}  {field.description or ''}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Returns SGLang's exit status; 2 when the settings cannot work."""
    parser = argparse.ArgumentParser(
        "python -m atoll.engine",
        description=__doc__,
        epilog=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    parent = os.getppid()
    try:
        settings = load_settings(EngineSettings)
        configure_logging("engine", settings.log_level)
        if settings.die_with_parent:
            die_with_parent.arm(signal.SIGTERM, parent)
        return asyncio.run(run(settings))
    except BadConfiguration as error:
        print(f"atoll engine: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
