"""What people forget: every setting, command and flag stands in the docs; what the README and Makefile name exists; every
link leads somewhere, and every page is reached."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from asynctask.cli.options import SettingOption
from asynctask.cli.root import build
from asynctask.config import ENV_PREFIX, Config
from asynctask.lists.options import SubmitOptions
from asynctask.task import TaskHandle
from asynctask.worker import UntrackedOptions, WorkerOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def children(group: click.Group) -> dict[str, click.Command]:
    """The commands of a group as it lists them, those that it loads only then among them."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in children(group).items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        elif not command.hidden:
            yield above + name, command


def setting_row(name: str) -> str:
    field = Config.__dataclass_fields__[name]
    low, high = field.metadata["low"], field.metadata["high"]
    limits = "" if low is None else f" From {low:,}" + (f" to {high:,}." if high is not None else ".")
    default = f"`{field.default}`" if field.default != "" else "(empty)"
    flag = "-A" if name == "app" else "--" + name.replace("_", "-")
    return f"| `{name}` | `{ENV_PREFIX}{name.upper()}` | `{flag}` | {default} | {field.metadata['help']}{limits} |"


def test_every_setting_stands_in_the_table_of_settings() -> None:
    lines = (ROOT / "docs/reference/settings.md").read_text().splitlines()
    missing = [row for row in (setting_row(field.name) for field in fields(Config)) if row not in lines]
    assert not missing, "put these lines into docs/reference/settings.md:\n" + "\n".join(missing)


def test_the_table_of_settings_has_no_setting_that_does_not_exist() -> None:
    named = re.findall(r"^\| `(\w+)` \| `ASYNCTASK_", (ROOT / "docs/reference/settings.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(Config))


def test_every_command_has_its_section_and_every_flag_of_its_own_is_in_it() -> None:
    text, faults = (ROOT / "docs/reference/cli.md").read_text(), []
    for name, command in commands(build()):
        heading = f"## `asynctask {name}`\n"
        if heading not in text:
            faults.append(f"docs/reference/cli.md needs a section {heading!r}")
        section = text.partition(heading)[2].partition("\n## ")[0]
        for option in command.params:
            if isinstance(option, click.Option) and not isinstance(option, SettingOption) and option.name != "as_json":
                longest = max(option.opts, key=len)
                if f"`{longest}" not in section:
                    faults.append(f"the section of {name} in docs/reference/cli.md does not tell about {longest}")
    assert not faults, "\n".join(faults)


def test_every_command_says_in_its_help_what_it_does() -> None:
    faults = []
    for name, command in commands(build()):
        faults += [] if command.help else [f"{name} has no help"]
        silent = [o for o in command.params if isinstance(o, click.Option) and not o.help]
        faults += [f"the flag {option.name} of {name} has no help" for option in silent]
    assert not faults, "\n".join(faults)


def test_every_target_of_the_makefile_stands_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), f"{target} needs a ## description in the Makefile"


def sections(page: Path) -> set[str]:
    """The anchors of a page: its headings, as the site and the repository name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_link_of_a_page_leads_somewhere() -> None:
    faults = []
    for page in (*ROOT.glob("*.md"), *PAGES):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, section = link.partition("#")
            target = page.parent.joinpath(name) if name else page
            if "://" not in link and not (target.exists() and (not section or section in sections(target))):
                faults.append(f"{page.relative_to(ROOT)} links to {link}, which is not there")
    assert not faults, "\n".join(faults)


def test_every_page_is_reached_from_the_index() -> None:
    """By links, from page to page; the decisions, from the page of the internals."""
    reached, found = set(), [ROOT / "docs/index.md"]
    while found:
        page = found.pop()
        reached.add(page)
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", page.read_text())]
        found += {page.parent.joinpath(link).resolve() for link in links if "://" not in link} - reached
    assert set(PAGES) - reached == set()


def test_every_page_but_the_decisions_has_its_place_in_the_site() -> None:
    named = re.findall(r"\b([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent.name != "decisions"]
    assert sorted(named) == sorted(pages)


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; `make docs` installs it")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = r"<(?:script|img)[^>]* src=\"?https?:|<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*https?:"
    assert [page.name for page in tmp_path.rglob("*.html") if re.search(loaded, page.read_text())] == []


def test_every_python_example_is_python() -> None:
    for page in (ROOT / "README.md", *PAGES):
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            compile(block, str(page), "exec")


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first column of the table of a page whose head begins with ``heading``."""
    table = (ROOT / page).read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)[(`]", line.split("|")[1])}


def test_the_page_of_python_has_every_option_of_a_worker_and_of_a_list() -> None:
    of_worker = set(WorkerOptions.__annotations__) - set(UntrackedOptions.__annotations__)
    assert first_cells("docs/reference/python.md", "option of `@app.worker`") == of_worker
    assert first_cells("docs/reference/python.md", "option") == set(SubmitOptions.model_fields)


def test_the_page_of_python_has_every_method_of_a_task() -> None:
    text = (ROOT / "docs/reference/python.md").read_text()
    for name in vars(TaskHandle):
        assert name.startswith("_") or re.search(rf"[`.]{name}[(`]", text), f"docs/reference/python.md lacks task.{name}"


def test_the_commands_of_the_readme_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the README names make {target}"
    known = {name for name, _ in commands(build())}
    for command in re.findall(r"^    asynctask (?:-A \S+ )?((?:(?:db|middleware) )?\w+)", text, re.MULTILINE):
        assert command in known, f"the README names asynctask {command}"


def test_the_constraints_name_versions_and_no_addresses() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line) for line in lines if not line.startswith("#"))
    assert not any("://" in line for line in lines)
