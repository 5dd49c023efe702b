"""Alembic's entry: runs on the connection it is given, or on ASYNCTASK_DATABASE_URL."""

import os

from alembic import context

from asynctask.database.engine import Database
from asynctask.database.tables import full_metadata


def run(connection) -> None:
    context.configure(
        connection=connection, target_metadata=full_metadata(), render_as_batch=True, transaction_per_migration=True
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    database = Database(os.environ.get("ASYNCTASK_DATABASE_URL", "sqlite:///asynctask.db"))
    with database.write() as opened:
        run(opened)
    database.close()
