"""The page of figures says what the kept results say, and every promised speed is on it: measured, or named as not yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, page
from benchmarks.promises import DATABASES, PROMISES

ROOT = Path(__file__).resolve().parents[2]
PAGE, KEPT = ROOT / "docs/explanation/figures.md", ROOT / "docs/explanation/figures.jsonl"


def found(**settings: Any) -> dict[str, Any]:
    """A result of ``tracked`` on SQLite."""
    said = {
        "command": "python -m benchmarks.tracked -n 100000", "at": "2026-01-02T03:04:05.678Z", "database": "SQLite 3.40.1",
        "durability": {"synchronous": "2"}, "as_in_production": True, "kind": "sqlite", "broker": "the database",
        "python": "3.11.7", "cpus": 2, "ram_mb": 8_000, "os": "Linux", "load": 0.1, "processes": 1, "job": "nothing",
        "poll": "the submitter alone", "peer": "a | b",
    }  # fmt: skip
    values = {"name": "tracked", "n": 100_000, "ours": 6_000.0, "peer": 3_000.0, "ratio": 2.0, "unit": "items/s"}
    return {**values, "settings": {**said, **settings}}


def line_of(results: list[dict[str, Any]], text: str) -> str:
    return next(line for line in page.render(results).splitlines() if text in line)


def test_the_page_is_what_the_kept_results_render_to() -> None:
    there = "docs/explanation/figures"
    again = f"write it anew: python -m benchmarks.figures --from {there}.jsonl --out {there}.md"
    assert PAGE.read_text() == page.render(figures.read_results(KEPT)), again


def test_every_promised_speed_is_on_the_page_for_each_database_or_named_as_not_yet_measured() -> None:
    text, _, missing = PAGE.read_text().partition("## Not yet measured")
    faults = []
    for promise in PROMISES:
        section = text.partition(f"## {promise.title}\n")[2].partition("\n## ")[0]
        named = next((line for line in missing.splitlines() if line.startswith(f"- {promise.title}: ")), "")
        for kind in promise.kinds:
            measured = f"\n| {DATABASES[kind]} " in section
            if measured == (DATABASES[kind] in named.rpartition(": ")[2].split(", ")):
                faults.append(f"{promise.title} on {kind}")
    assert not faults, "\n".join(faults)


def test_a_figure_is_judged_by_what_it_must_reach() -> None:
    assert "at least 5,000 items/s: reached" in line_of([found()], "| SQLite")
    slow = {**found(), "ours": 4_999.0}
    assert "**missed**" in line_of([slow], "| SQLite")
    assert "**missed**" in page.render([{**found(kind="mariadb", database="MariaDB 10.11"), "ours": 2_499.0}])


def test_a_figure_of_few_items_or_of_a_database_that_may_forget_is_not_judged() -> None:
    assert "a quick look, says nothing" in line_of([{**found(), "n": 5_000}], "| SQLite")
    forgetful = found(as_in_production=False)
    assert "not durable, says nothing" in line_of([forgetful], "| SQLite")
    assert "**not as in production**" in page.render([forgetful])


def test_the_run_of_the_most_items_speaks_and_of_these_the_last() -> None:
    quick = {**found(command="a", at="2027-01-01T00:00:00.000Z"), "n": 10, "ours": 1.0}
    old, new = found(command="b", at="2026-01-01T00:00:00.000Z"), {**found(command="c"), "ours": 7_000.0}
    assert "| 7,000 items/s |" in line_of([new, old, quick], "| SQLite")


def test_other_jobs_and_polled_runs_are_no_figure_of_the_no_op() -> None:
    assert "| SQLite" not in page.render([found(job="commits one row of its own"), found(poll="one HTTP client")])


def test_the_numbers_of_processes_that_claim_each_have_their_line_and_the_fall_is_judged() -> None:
    rates = {f"{side}_{count}": {"per_s": count * by} for side, by in (("ours", 40), ("peer", 10)) for count in (15, 120)}
    claimed = {**found(work_ms=20.0, last_to_best=0.9, **rates), "name": "claim", "n": 10_000, "unit": "jobs/s"}
    assert "| 4,800 jobs/s | 1,200 jobs/s | 4.00 |" in line_of([claimed], "| 120 processes |")
    assert "at least 0.95: **missed**" in line_of([claimed], "| the most processes to the best")


def test_what_a_result_says_cannot_break_the_table() -> None:
    assert "peer: a \\| b" in page.render([found()])


def test_a_later_result_takes_the_place_of_the_same_command(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = ["tracked   n 1   ours 2", json.dumps(found()), json.dumps({**found(), "ours": 8_000.0})]
    path.write_text("\n".join(lines) + "\n")
    assert [each["ours"] for each in figures.read_results(path)] == [8_000.0]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"name": "tracked"}',
        json.dumps({**found(), "settings": {"command": "x"}}),
        json.dumps({**found(), "ours": "6000"}),
    ],
)
def test_what_is_no_result_is_refused_with_its_line(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(found()) + "\n" + line + "\n")
    assert figures.main(["--from", str(path), "--out", str(tmp_path / "page.md")]) == 2
    assert "line 2" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


@pytest.mark.full(reason="a way of measuring, not the product")
def test_a_quick_look_is_printed_and_with_a_page_to_write_the_results_are_kept_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--only", "submit", "--servers", "sqlite"]
    assert figures.main([*words, "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page.render(figures.read_results(tmp_path / "page.jsonl"))
    assert "## Items submitted to the ledger" in (tmp_path / "page.md").read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["page.jsonl", "page.md"]
    assert "1 of 1: python -m benchmarks.submit" in capsys.readouterr().err
