"""Callbacks of Tasks.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MARIADB = {
    "mariadb_engine": "InnoDB",
    "mariadb_row_format": "DYNAMIC",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}


def upgrade() -> None:
    """Up."""
    json = sa.Text().with_variant(mysql.LONGTEXT(), "mariadb").with_variant(mysql.LONGTEXT(), "mysql")
    op.add_column("events", sa.Column("callback_of", sa.BigInteger(), nullable=True))
    op.add_column("tasks", sa.Column("callbacks", json, nullable=True))
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("on_complete")  # it was never written
    op.create_table(
        "task_callbacks",
        sa.Column("task_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("worker_name", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "generation", "name", name=op.f("pk_task_callbacks")),
        **MARIADB,
    )


def downgrade() -> None:
    """Down."""
    op.drop_table("task_callbacks")
    op.add_column("tasks", sa.Column("on_complete", sa.String(length=255), nullable=True))
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("callbacks")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_column("callback_of")
