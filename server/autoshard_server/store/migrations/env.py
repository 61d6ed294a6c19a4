"""Alembic's entry point: migrates on the connection, and in the transaction, of the caller."""

from alembic import context

from autoshard_server.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
