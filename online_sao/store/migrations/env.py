"""Run by alembic: the connection comes from online_sao.store.migration, in a transaction."""

from alembic import context

from online_sao.store.models import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters few things in place
)
with context.begin_transaction():
    context.run_migrations()
