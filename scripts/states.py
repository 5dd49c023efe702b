"""The page of the states: ``python scripts/states.py > docs/reference/states.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from asynctask.core.states import EVENT_EDGES, TASK_EDGES, Edge

_INTRODUCTION = """\
Generated from the table in `asynctask/core/states.py`; do not edit. Every transition that is not listed here is refused.
To generate the page again: `python scripts/states.py > docs/reference/states.md`."""

_ROLES = """\
The column *who* names the roles that may take a transition. *submitter*: the caller who submits the list, and the
splitter on the caller's behalf. *worker*: the middleware and the runtime around one job. *sweep*: recovery, closing
and other maintenance, in any process. *person*: a user or program, through the API, the command line or Python."""


def diagram(edges: Iterable[Edge]) -> str:
    """A Mermaid state diagram of the edges: one arrow per (from, to), with its reasons."""
    arrows: dict[tuple[str, str], list[str]] = {}
    targets = set()
    sources = set()
    for edge in edges:
        arrows.setdefault((edge.source or "[*]", edge.target), []).append(edge.reason)
        sources.add(edge.source)
        targets.add(edge.target)
    lines = ["stateDiagram-v2"]
    lines += [f"    {a} --> {b}: {', '.join(dict.fromkeys(reasons))}" for (a, b), reasons in arrows.items()]
    lines += [f"    {end} --> [*]" for end in sorted(targets - sources)]
    return "\n".join(lines)


def table(edges: Iterable[Edge]) -> str:
    """A Markdown table of the edges."""
    lines = ["| from | to | reason | who | why |", "|---|---|---|---|---|"]
    for edge in edges:
        who = ", ".join(sorted(edge.who))
        lines.append(f"| {edge.source or '(new)'} | {edge.target} | {edge.reason} | {who} | {edge.why} |")
    return "\n".join(lines)


def page() -> str:
    """The text of `docs/reference/states.md`: diagram and table of Event and Task, each between markers."""
    parts = ["# States", _INTRODUCTION, _ROLES]
    for name, edges, what in (
        ("event", EVENT_EDGES, "The status of an Event, the record of one job."),
        ("task", TASK_EDGES, "The state of a Task, all jobs of one submission."),
    ):
        shown = f"```mermaid\n{diagram(edges)}\n```\n\n{table(edges)}"
        parts.append(f"## {name.capitalize()}\n\n{what}\n\n<!-- {name}: begin -->\n{shown}\n<!-- {name}: end -->")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
