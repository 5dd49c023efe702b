"""Corrected lists: which row of which Task a row corrects.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_OPTIONS = {
    "mariadb_engine": "InnoDB",
    "mariadb_row_format": "DYNAMIC",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}


def upgrade() -> None:
    """Up."""
    op.add_column("tasks", sa.Column("mended", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.create_table(
        "resubmitted_rows",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("row", sa.BigInteger(), nullable=False),
        sa.Column("of_task", sa.BigInteger(), nullable=True),
        sa.Column("of_row", sa.BigInteger(), nullable=False),
        sa.Column("taken", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_resubmitted_rows")),
        sa.UniqueConstraint("task_id", "number", name="uq_resubmitted_rows_number"),
        sa.UniqueConstraint("of_task", "of_row", "taken", name="uq_resubmitted_rows_taken"),
        **_OPTIONS,
    )
    op.create_index("ix_resubmitted_rows_row", "resubmitted_rows", ["task_id", "row"])
    op.create_table(
        "task_ancestors",
        sa.Column("ancestor_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("task_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("ancestor_id", "task_id", name=op.f("pk_task_ancestors")),
        **_OPTIONS,
    )
    op.create_index("ix_task_ancestors_task_id", "task_ancestors", ["task_id"])


def downgrade() -> None:
    """Down."""
    op.drop_table("task_ancestors")
    op.drop_table("resubmitted_rows")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("mended")
