"""Run by alembic with the connection that Database hands over, inside its transaction."""

from alembic import context
from atoll.gateway.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
