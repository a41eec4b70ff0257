"""Brings the database to this release's schema; forward only."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from atoll.common.errors import BadConfiguration
from atoll.registry.database import Database

VERSION_TABLE = "registry_schema"
_ADVISORY_LOCK = 0x41544F4C
"""Any constant that every registry shares: PostgreSQL runs DDL of two transactions side by side without it."""


def migrate(database: Database) -> None:
    """Applies the missing migrations in one transaction; several processes may call it at once.

    Raises BadConfiguration when a newer release has written the database.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    with database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        unknown = sorted(set(context.get_current_heads()) - known)
        if unknown:
            raise BadConfiguration(
                f"the registry's database {database.shown_url} has schema {', '.join(unknown)}, this release knows "
                f"{max(known)} at most: it was written by a newer release; start that one, or restore an older copy",
                field="ATOLL_REGISTRY_DATABASE_URL",
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
