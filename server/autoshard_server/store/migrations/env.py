"""Alembic's entry point: migrates over the connection, and in the transaction, it is given."""

from alembic import context

from autoshard_server.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
