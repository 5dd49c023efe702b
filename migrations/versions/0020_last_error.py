"""An Event keeps the last error of its attempts, and the traceback of that error.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_COLUMNS = ("last_error", "traceback")


def upgrade() -> None:
    """Up. Processes of 0019 go on: the errors of their jobs are in the messages alone."""
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
