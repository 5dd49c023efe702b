"""The search over all Tasks: values of items.

Revision ID: 0027
Revises: 0026
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0025 go on: a search does not find what they submit, and their purge leaves values behind."""
    found = sa.inspect(op.get_bind())
    # MariaDB commits each change by itself: after a failure, what is done is found done.
    if "search_values" in found.get_table_names():
        return
    key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    value = sa.String(100).with_variant(sa.String(100, collation="C"), "postgresql")
    op.create_table(
        "search_values",
        sa.Column("id", key, autoincrement=True, nullable=False),
        sa.Column("value", value, nullable=False),
        sa.Column("field", sa.String(100), nullable=False),
        sa.Column("task_id", sa.BigInteger),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("row", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_search_values"),
        sa.Index("ix_search_values_value", "value", "id"),
        sa.Index("ix_search_values_event", "task_id", "seq"),
        mariadb_engine="InnoDB",
        mariadb_row_format="DYNAMIC",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
    )


def downgrade() -> None:
    """Down. A search over all Tasks is gone with its values."""
    if "search_values" in sa.inspect(op.get_bind()).get_table_names():
        op.drop_table("search_values")
