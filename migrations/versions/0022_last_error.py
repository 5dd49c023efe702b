"""An Event keeps the last error of its attempts, and the traceback of that error.

Revision ID: 0022
Revises: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None
processes_go_on = True

_COLUMNS = ("last_error", "traceback")


def upgrade() -> None:
    """Up. Processes of 0021 go on: the errors of their jobs are in the messages alone."""
    for name in _missing():
        op.add_column("events", sa.Column(name, sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")))


def downgrade() -> None:
    """Down. The messages keep the errors."""
    for name in set(_COLUMNS) - set(_missing()):
        op.drop_column("events", name)


def _missing() -> list[str]:
    # MariaDB commits each change by itself: after a failure, what is done is found done.
    known = {each["name"] for each in sa.inspect(op.get_bind()).get_columns("events")}
    return [name for name in _COLUMNS if name not in known]
