"""Open Tasks: how one takes additions, and the additions that had an idempotency key.

Revision ID: 0025
Revises: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None
processes_go_on = True


def upgrade() -> None:
    """Up. Processes of 0024 go on: they perform the jobs of open Tasks, and neither add to them nor seal them."""
    found = sa.inspect(op.get_bind())
    # MariaDB commits each change by itself: after a failure, what is done is found done.
    if "additions" not in {each["name"] for each in found.get_columns("tasks")}:
        op.add_column("tasks", sa.Column("additions", sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")))
    if "task_additions" in found.get_table_names():
        return
    op.create_table(
        "task_additions",
        sa.Column("task_id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=False),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("first_row", sa.BigInteger, nullable=False),
        sa.Column("accepted", sa.BigInteger, nullable=False),
        sa.Column("rejected", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("task_id", "idempotency_key", name="pk_task_additions"),
        mariadb_engine="InnoDB",
        mariadb_row_format="DYNAMIC",
        mariadb_charset="utf8mb4",
        mariadb_collate="utf8mb4_nopad_bin",
    )


def downgrade() -> None:
    """Down. Seal the open Tasks before: processes of 0022 end none of them."""
    found = sa.inspect(op.get_bind())
    if "task_additions" in found.get_table_names():
        op.drop_table("task_additions")
    if "additions" in {each["name"] for each in found.get_columns("tasks")}:
        op.drop_column("tasks", "additions")
