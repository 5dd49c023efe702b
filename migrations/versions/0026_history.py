"""The history: what ended in each minute, and what waited.

Revision ID: 0026
Revises: 0025
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None
processes_go_on = True

_COUNTS = ("finish", "failed", "error", "retried", *(f"took_{i}" for i in range(35)))


def upgrade() -> None:
    """Up. Processes of 0025 go on: what they record is not in the history."""
    op.create_table(
        "history",
        sa.Column("at", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("worker_name", sa.String(255), nullable=False),
        sa.Column("waiting", sa.BigInteger),
        *(sa.Column(name, sa.Integer, nullable=False, server_default=sa.text("0")) for name in _COUNTS),
        sa.PrimaryKeyConstraint("at", "queue", "worker_name", name="pk_history"),
        mariadb_engine="InnoDB",
        mariadb_row_format="DYNAMIC",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
    )


def downgrade() -> None:
    """Down."""
    op.drop_table("history")
