"""Alembic's entry: runs the migrations on the connection that `collage_server.store.migrate` hands over."""

from alembic import context

from collage_server.store.server_tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, transaction_per_migration=False
)
context.run_migrations()
