"""The page of figures: runs the benchmarks, or takes what they printed, and writes a table for each promised speed.

    python -m benchmarks.figures [--quick] [--servers KIND,...] [--only NAME,...] [--from RESULTS] [--out PAGE]

Without ``--out`` the page is printed and nothing is kept. With it, each result is kept beside the page as soon as it is
there, one JSON object a line (``figures.jsonl`` beside ``docs/explanation/figures.md``), and takes the place of the one
before of the same command, so that a part can be run again. ``--from`` runs nothing. Nothing on the page is typed by hand.

A quick look takes about a minute, the full run about an hour, on a machine of two processors with nothing else to do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynctask.clock import SystemClock
from benchmarks import databases, page
from benchmarks.children import ROOT
from benchmarks.common import Refused
from benchmarks.promises import SHORT

__all__ = ["main", "merged", "read_results"]

KEYS = ["name", "n", "ours", "peer", "ratio", "unit", "settings"]
MAX_BYTES = 10_000_000


@dataclass(frozen=True)
class Step:
    """One benchmark with its words for a figure and for a quick look.

    ``looked``: on what a quick look runs it. ``on``: on what a full run does.
    """

    name: str
    full: tuple[str, ...]
    quick: tuple[str, ...] = ()
    looked: tuple[str, ...] = ()
    on: tuple[str, ...] = databases.KINDS


_ONE_MS = ("--work-ms", "1")
_LIMITS = ("--work-ms", "20", "--parallel", "1,5,20,100")
STEPS = (
    Step("tracked", ("-n", "100000"), ("-n", "3000", "--runs", "1"), databases.KINDS),
    Step("tracked", ("-n", "60000", *_ONE_MS), ("-n", "2000", "--runs", "1", *_ONE_MS), ("sqlite",)),
    Step("tracked", ("-n", "20000", *_ONE_MS, "--compute")),
    Step(
        "tracked",
        ("-n", "100000", "--redis"),
        ("-n", "3000", "--runs", "1", "--redis"),
        ("postgresql",),
        on=("postgresql",),
    ),
    Step("tracked", ("-n", "60000", "--redis", *_ONE_MS), on=("postgresql",)),
    Step("tracked", ("-n", str(SHORT), "--runs", "9")),
    Step("tracked", ("-n", str(SHORT), "--runs", "9", "--redis"), on=("postgresql",)),
    Step("submit", ("-n", "300000"), ("-n", "20000", "--runs", "1"), databases.KINDS),
    Step("small", ("-n", "20000"), ("-n", "300"), ("sqlite",)),
    Step("small", ("-n", "20000", "--redis"), on=("postgresql",)),
    Step("poll", ("-n", "1000000"), ("-n", "6000", "--polls", "20"), ("sqlite",)),
    Step("sheet", ("-n", "500000", "--kind", "csv"), ("-n", "10000", "--kind", "csv"), ("sqlite",)),
    Step("sheet", ("-n", "500000", "--kind", "xlsx"), ("-n", "10000", "--kind", "xlsx"), ("sqlite",)),
    Step("reports", ("-n", "100000", "--format", "csv"), ("-n", "2000", "--format", "csv"), ("sqlite",)),
    Step("reports", ("-n", "100000", "--format", "xlsx"), ("-n", "2000", "--format", "xlsx"), ("sqlite",)),
    Step("exports", ("-n", "500000"), ("-n", "5000", "--runs", "1"), ("sqlite",), on=("sqlite",)),
    Step("exports", ("-n", "500000", "--format", "xlsx", "--runs", "1"), on=("sqlite",)),
    Step("exports", ("-n", "500000", "--format", "parquet"), on=("sqlite",)),
    Step("cost", ("-n", "100000"), ("-n", "10000"), ("sqlite",)),
    Step("claim", ("-n", "10000")),
    Step("claim", ("-n", "1000000")),
    Step("throttled", ("-n", "1000"), ("-n", "50", "--runs", "1", "--workers", "1"), ("sqlite",)),
    Step("throttled", ("-n", "400", *_LIMITS)),
    Step("throttled", ("-n", "1000", "--redis"), on=("postgresql",)),
    Step("throttled", ("-n", "400", "--redis", *_LIMITS), on=("postgresql",)),
    Step("noop", ("-n", "100000"), ("-n", "5000", "--runs", "1"), ("sqlite",), on=("sqlite",)),
    Step("noop", ("-n", "100000", "--delay-ms", "1"), on=("sqlite",)),
    *(
        Step("engines", ("-n", "2000", *engine, "--work-ms", "10", "--queued"), on=("postgresql",))
        for engine in (
            ("--engine", "celery"),
            ("--engine", "celery", "--pool", "prefork", "-c", "2"),
            ("--engine", "dramatiq", "-c", "8"),
            ("--engine", "rq", "-c", "2"),
        )
    ),
    Step("engines", (), ("-n", "200", "--runs", "1"), ("sqlite",), on=()),
    Step("idle", ("-n", "30", "--redis"), ("-n", "2", "--redis"), ("sqlite",)),
)
MISSING = 3
"""What a benchmark ends with where the program of a server is not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0; 1 where a benchmark gave no figure, the page tells the others; 2 for what is refused."""
    options = _parser().parse_args(argv)
    failed = 0
    try:
        if options.source is not None:
            results = read_results(options.source)
        else:
            keep = options.out.with_suffix(".jsonl") if options.out else None
            results = read_results(keep) if keep is not None and keep.exists() else []
            steps = list(plan(options))
            for number, words in enumerate(steps, 1):
                found, code = _run(words, f"{number} of {len(steps)}")
                failed += code not in (0, MISSING)
                if found is not None:
                    results = merged(results, found)
                    if keep is not None:
                        _write(keep, "".join(json.dumps(each) + "\n" for each in results))
    except Refused as error:
        print(f"benchmarks.figures: {error}", file=sys.stderr)
        return 2
    text = page.render(results)
    if options.out is None:
        print(text, end="")
    else:
        _write(options.out, text)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, one run each")
    parser.add_argument("--servers", type=_listed(databases.KINDS), default=databases.KINDS, help="on which (default all)")
    names = tuple(dict.fromkeys(step.name for step in STEPS))
    parser.add_argument("--only", type=_listed(names), default=names, help=f"of {', '.join(names)} (default all)")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="RESULTS", help="run nothing: lines that --json printed"
    )
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the page here, and the results beside it")
    return parser


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return words

    return parse


def plan(options: argparse.Namespace) -> Iterator[list[str]]:
    """The words of every benchmark that is to be run, its name first."""
    for server in options.servers:
        for step in STEPS:
            wanted = step.name in options.only and server in (step.looked if options.quick else step.on)
            if wanted and importlib.util.find_spec(f"benchmarks.{step.name}") is not None:
                yield [step.name, *(step.quick if options.quick else step.full), "--server", server]


def _run(words: Sequence[str], which: str) -> tuple[dict[str, Any] | None, int]:
    """One benchmark in a process of its own: what it found, None where it gives no figure, and its exit code."""
    clock = SystemClock()
    print(f"{which}: python -m benchmarks.{' '.join(words)} ...", end="", file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:], "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = clock.monotonic()
    # What it says on the way goes to a file: a pipe that nobody empties would stop a talkative one.
    with tempfile.TemporaryFile("w+") as out:
        code = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, check=False).returncode
        out.seek(0)
        lines = out.read().splitlines()
    print(f" {clock.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    if code or not lines:
        print(f"benchmarks.{words[0]} gave no figure (exit code {code})", file=sys.stderr, flush=True)
        return None, code or 1
    return _result(lines[-1], f"benchmarks.{words[0]}"), 0


def _result(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        raise Refused(f"{where}: this is no JSON object: {line[:80]!r}; give what --json printed") from None
    if not isinstance(found, dict) or list(found) != KEYS or not isinstance(found["settings"], dict):
        raise Refused(f"{where}: a result has {', '.join(KEYS)}; give what --json printed")
    numbers = (found["n"], found["ours"], *(found[name] for name in ("peer", "ratio") if found[name] is not None))
    if not all(isinstance(each, int | float) for each in numbers):
        raise Refused(
            f"{where}: n, ours, peer and ratio are numbers (peer and ratio may be null); give what --json printed"
        )
    if missing := [name for name in page.NEEDED if name not in found["settings"]]:
        raise Refused(f"{where}: its settings lack {', '.join(missing)}: it is of an older version, run it again")
    return found


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of a file of JSON lines, a later one in the place of an earlier of the same. Raises :class:`Refused`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise Refused(f"{path} has more than {MAX_BYTES:,} bytes: that is no file of results")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    results: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        # What a benchmark prints before its last line is for people.
        if line.startswith("{"):
            results = merged(results, _result(line, f"{path}, line {number}"))
    return results


def merged(results: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """The results with one more, which takes the place of the one of the same command."""
    command = found["settings"]["command"]
    if command not in [each["settings"]["command"] for each in results]:
        return [*results, found]
    return [found if each["settings"]["command"] == command else each for each in results]


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


if __name__ == "__main__":
    sys.exit(main())
