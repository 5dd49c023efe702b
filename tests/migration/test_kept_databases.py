"""The databases that tests leave behind are as good as new, or nobody gets them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.databases import Databases


@pytest.mark.databases("postgresql", "mariadb")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE alembic_version SET version_num = '0001'",
        "CREATE TABLE left_over (n INTEGER)",
        "ALTER TABLE events DROP COLUMN result",
    ],
)
def test_a_database_whose_schema_a_test_has_changed_is_given_to_no_other(
    databases: Databases, database_kind: str, tmp_path: Path, change: str
) -> None:
    changed = databases.fresh(database_kind, tmp_path)
    changed.sql(change)
    changed.close()
    following = databases.fresh(database_kind, tmp_path)
    assert following.url != changed.url
    following.close()
