"""Run by alembic with the connection, and its open transaction, that `atoll.registry.migrate` hands over."""

from alembic import context
from atoll.registry.migrate import VERSION_TABLE
from atoll.registry.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
context.run_migrations()
