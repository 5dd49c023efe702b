"""The history: what ran in each minute, and how many processes were live.

Revision ID: 0028
Revises: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None
processes_go_on = True

_COLUMNS = ("running", "processes")


def upgrade() -> None:
    """Up. Processes of 0027 go on: in the minutes that they sample, what ran is not known."""
    # MariaDB commits each change by itself: after a failure, what is done is found done.
    found = {each["name"] for each in sa.inspect(op.get_bind()).get_columns("history")}
    for name in _COLUMNS:
        if name not in found:
            op.add_column("history", sa.Column(name, sa.BigInteger))


def downgrade() -> None:
    """Down."""
    found = {each["name"] for each in sa.inspect(op.get_bind()).get_columns("history")}
    for name in _COLUMNS:
        if name in found:
            op.drop_column("history", name)
