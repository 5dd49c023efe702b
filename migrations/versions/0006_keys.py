"""Keys: items with equal values of a field run one after the other.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
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
    op.add_column("events", sa.Column("line", sa.BigInteger(), nullable=True))
    op.add_column("tasks", sa.Column("key_field", sa.String(length=255), nullable=True))
    where = sa.text("split_until IS NOT NULL")
    op.create_index("ix_tasks_split_until", "tasks", ["split_until"], sqlite_where=where, postgresql_where=where)
    op.create_table(
        "key_places",
        sa.Column("event_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("line", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("holds", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_key_places")),
        **MARIADB,
    )
    op.create_index("ix_key_places_line", "key_places", ["line", "holds", "place", "event_id"])


def downgrade() -> None:
    """Down."""
    op.drop_table("key_places")
    op.drop_index("ix_tasks_split_until", table_name="tasks")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_column("key_field")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_column("line")
