"""What the other databases, sessions and long queues need.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Whatever a MariaDB database's own defaults are: names differ where a byte differs, 'a' from 'A' and from 'a '.
MARIADB = {
    "mariadb_engine": "InnoDB",
    "mariadb_row_format": "DYNAMIC",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_nopad_bin",
}


def upgrade() -> None:
    """Up."""
    op.create_table(
        "write_marks",
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_write_marks")),
        **MARIADB,
    )
    _widen_jobs()
    _widen_tasks()


def downgrade() -> None:
    """Down."""
    _narrow_tasks()
    _narrow_jobs()
    op.drop_table("write_marks")


# -- jobs: the head of a queue without what is fetched already

_OLD_WAITS = "process IS NULL AND held_in IS NULL"


# Acknowledging and claiming in one round trip. Its plans are kept, so they must not be those of an empty table, which is
# how a queue spends its life: nothing but the indexes is left to choose from.
_EXCHANGE_TAKES = "text, bigint[], text[], bigint[], bigint[], bigint[], integer, integer"
_EXCHANGE = """
CREATE OR REPLACE FUNCTION asynctask_exchange(
  p_process text, p_done bigint[], p_queues text[], p_waits bigint[], p_ids bigint[], p_until bigint[],
  p_limit integer, p_spread integer
) RETURNS TABLE (
  o_id bigint, o_jid varchar, o_attempt integer, o_queue varchar, o_payload text, o_priority integer, o_task_id bigint,
  o_deaths integer, o_waits bigint, o_range integer, o_spread integer
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
  missing integer := p_limit;
  spread integer := p_spread;
  got integer;
  head bigint;
  seen bigint[];
BEGIN
  IF cardinality(p_done) > 0 THEN
    -- The index on process is full of what processes had before: it is kept out.
    DELETE FROM jobs WHERE id = ANY (p_done) AND coalesce(process, '') = p_process;
  END IF;
  FOR i IN 1 .. cardinality(p_queues) LOOP
    EXIT WHEN missing <= 0;
    SELECT j.waits INTO head FROM jobs AS j
      WHERE j.queue = p_queues[i] AND j.waits IS NOT NULL
        AND (j.waits, j.id) > (p_waits[i], p_ids[i]) AND j.waits < p_until[i]
      ORDER BY j.waits, j.id LIMIT 1;
    CONTINUE WHEN NOT FOUND;
    -- Looked up without a lock and locked by their id: those of others cost a step over them, no more. Where many claim at
    -- once, each begins at another of the first ones.
    FOR try IN 1 .. 4 LOOP
      seen := ARRAY(
        SELECT j.id FROM jobs AS j
        WHERE j.queue = p_queues[i] AND j.waits IS NOT NULL
          AND (j.waits, j.id) > (p_waits[i], p_ids[i]) AND j.waits <= head
        ORDER BY j.waits, j.id LIMIT missing OFFSET floor(random() * spread)
      );
      IF cardinality(seen) = 0 AND spread > 0 THEN
        spread := CASE WHEN try < 3 THEN spread / 4 ELSE 0 END;
        CONTINUE;
      END IF;
      RETURN QUERY
        WITH picked AS MATERIALIZED (
          SELECT j.id, j.jid, j.attempt, j.queue, j.payload, j.priority, j.task_id, j.deaths, j.waits FROM jobs AS j
          WHERE j.id = ANY (seen) AND j.waits IS NOT NULL FOR UPDATE SKIP LOCKED
        ), taken AS (
          UPDATE jobs SET process = p_process, waits = NULL WHERE id = ANY (ARRAY(SELECT p.id FROM picked AS p))
        )
        SELECT p.*, i, spread FROM picked AS p;
      GET DIAGNOSTICS got = ROW_COUNT;
      missing := missing - got;
      EXIT WHEN got = cardinality(seen);
      spread := least(greatest(2 * spread, 4 * p_limit), 20000);
      IF got > 0 THEN
        missing := 0;  -- there is more, but in other hands: better soon again than in their way
        EXIT;
      END IF;
    END LOOP;
    CONTINUE WHEN missing <= 0;
    -- It is short, or all in other hands: from its head, passing over what is locked.
    RETURN QUERY
      WITH picked AS MATERIALIZED (
        SELECT j.id, j.jid, j.attempt, j.queue, j.payload, j.priority, j.task_id, j.deaths, j.waits FROM jobs AS j
        WHERE j.queue = p_queues[i] AND j.waits IS NOT NULL
          AND (j.waits, j.id) > (p_waits[i], p_ids[i]) AND j.waits < p_until[i]
        ORDER BY j.waits, j.id LIMIT missing FOR UPDATE SKIP LOCKED
      ), taken AS (
        UPDATE jobs SET process = p_process, waits = NULL WHERE id = ANY (ARRAY(SELECT p.id FROM picked AS p))
      )
      SELECT p.*, i, spread FROM picked AS p;
    GET DIAGNOSTICS got = ROW_COUNT;
    missing := missing - got;
  END LOOP;
END $$
"""


def _index(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "jobs", columns, unique=False, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _widen_jobs() -> None:
    op.add_column("jobs", sa.Column("waits", sa.BigInteger(), nullable=True))
    op.execute("UPDATE jobs SET waits = 2 * priority + 1 WHERE process IS NULL AND held_in IS NULL")
    op.drop_index("ix_jobs_waiting", table_name="jobs")
    op.drop_index("ix_jobs_task", table_name="jobs")
    _index("ix_jobs_waiting", ["queue", "waits", "id"], "waits IS NOT NULL")
    _index("ix_jobs_task", ["task_id"], "task_id IS NOT NULL AND waits IS NOT NULL")
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.text(_EXCHANGE))


def _narrow_jobs() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"DROP FUNCTION IF EXISTS asynctask_exchange({_EXCHANGE_TAKES})")
    op.drop_index("ix_jobs_waiting", table_name="jobs")
    op.drop_index("ix_jobs_task", table_name="jobs")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_column("waits")
    _index("ix_jobs_waiting", ["queue", "priority", "id"], _OLD_WAITS)
    _index("ix_jobs_task", ["task_id"], "task_id IS NOT NULL")


# -- tasks: what may be dispatched is found by an index, and sessions stand in line

_TASK_COLUMNS = {
    "ready": sa.Integer(),
    "due_next": sa.BigInteger(),
    "session_key": sa.String(length=32),
    "session_holder": sa.String(length=32),
    "session_waits": sa.Integer(),
}
_TASK_INDEXES = {
    "ix_tasks_ready": (["queue", "ready", "id"], "ready IS NOT NULL"),
    "ix_tasks_due_next": (["due_next"], "due_next IS NOT NULL"),
    "ix_tasks_dispatch_until": (["dispatch_until"], "dispatch_until IS NOT NULL"),
    "ix_tasks_line": (["session_key", "session_waits", "session_place", "id"], "session_waits IS NOT NULL"),
}


def _widen_tasks() -> None:
    op.create_table(
        "duties",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=True),
        sa.Column("held_until", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_duties")),
        **MARIADB,
    )
    for name, kind in _TASK_COLUMNS.items():
        op.add_column("tasks", sa.Column(name, kind, nullable=True))
    op.add_column("tasks", sa.Column("session_place", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.execute("UPDATE tasks SET ready = priority WHERE finished_at IS NULL AND state IN ('splitting', 'running')")
    for name, (columns, where) in _TASK_INDEXES.items():
        op.create_index(name, "tasks", columns, unique=False, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.create_index("uq_tasks_session_holder", "tasks", ["session_holder"], unique=True)
    # Where an index cannot be partial, what is open is found by the column itself.
    op.drop_index("ix_tasks_open", table_name="tasks")
    _open_index(["finished_at", "id"])
    op.drop_index("ix_events_due", table_name="events")


def _open_index(columns: list[str]) -> None:
    where = sa.text("finished_at IS NULL")
    op.create_index("ix_tasks_open", "tasks", columns, unique=False, sqlite_where=where, postgresql_where=where)


def _narrow_tasks() -> None:
    op.drop_index("ix_tasks_open", table_name="tasks")
    _open_index(["id"])
    op.create_index(
        "ix_events_due", "events", ["due_at", "task_id"], unique=False,
        sqlite_where=sa.text("due_at IS NOT NULL"), postgresql_where=sa.text("due_at IS NOT NULL"),
    )  # fmt: skip
    op.drop_index("uq_tasks_session_holder", table_name="tasks")
    for name in _TASK_INDEXES:
        op.drop_index(name, table_name="tasks")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        for name in (*_TASK_COLUMNS, "session_place"):
            batch_op.drop_column(name)
    op.drop_table("duties")
