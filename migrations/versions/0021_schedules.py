"""Periodic tasks: the schedules and their next ticks.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0020 go on: they have no schedules."""
    if "schedules" in sa.inspect(op.get_bind()).get_table_names():  # MariaDB commits each change by itself
        return
    op.create_table(
        "schedules",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("worker_name", sa.String(255), nullable=False),
        sa.Column("schedule", sa.String(255), nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("missed", sa.String(8), nullable=False),
        sa.Column("overlap", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("registered_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.Column("enabled", sa.BigInteger, nullable=False, server_default=sa.text("1")),
        sa.Column("next_at", sa.BigInteger),
        sa.Column("last_at", sa.BigInteger),
        sa.Column("last_task", sa.BigInteger),
        sa.Column("skipped", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("skipped_at", sa.BigInteger),
        sa.Column("skip_reason", sa.String(16)),
        sa.Column("error", sa.String(1024)),
        sa.PrimaryKeyConstraint("name", name="pk_schedules"),
        mariadb_engine="InnoDB",
        mariadb_row_format="DYNAMIC",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
    )


def downgrade() -> None:
    """Down."""
    op.drop_table("schedules")
