"""Rate limits of workers.

Revision ID: 0024
Revises: 0023
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None
processes_go_on = True

_MARIADB: Any = {
    "mariadb_engine": "InnoDB",
    "mariadb_row_format": "DYNAMIC",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}


def upgrade() -> None:
    """Up. Processes of 0023 go on: they know no limit, and start jobs at any rate."""
    known = sa.inspect(op.get_bind()).get_table_names()  # MariaDB commits each change by itself
    if "rates" not in known:
        op.create_table(
            "rates",
            sa.Column("name", sa.String(255), nullable=False),
            sa.Column("rate", sa.String(32), nullable=False),
            sa.Column("declared", sa.String(32), nullable=False),
            sa.Column("every", sa.BigInteger, nullable=False),
            sa.Column("free_at", sa.BigInteger, nullable=False, server_default=sa.text("0")),
            sa.PrimaryKeyConstraint("name", name="pk_rates"),
            **_MARIADB,
        )
    if "rated_workers" not in known:
        op.create_table(
            "rated_workers",
            sa.Column("worker_name", sa.String(255), nullable=False),
            sa.Column("limit_name", sa.String(255), nullable=False),
            sa.PrimaryKeyConstraint("worker_name", name="pk_rated_workers"),
            **_MARIADB,
        )


def downgrade() -> None:
    """Down."""
    op.drop_table("rated_workers")
    op.drop_table("rates")
