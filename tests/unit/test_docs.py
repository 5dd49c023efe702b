"""What people forget: every setting, command and flag stands in the docs; what the README and Makefile name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click

from asynctask.cli.options import SettingOption
from asynctask.cli.root import build
from asynctask.config import ENV_PREFIX, Config
from asynctask.lists.options import Options
from asynctask.task import TaskHandle
from asynctask.worker import UntrackedOptions, WorkerOptions

ROOT = Path(__file__).resolve().parents[2]


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


def test_every_link_of_a_page_leads_somewhere() -> None:
    faults = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()) if "://" not in link]
        gone = [link for link in links if not page.parent.joinpath(link).exists()]
        faults += [f"{page.relative_to(ROOT)} links to {link}, which is not there" for link in gone]
    assert not faults, "\n".join(faults)


def test_every_python_example_is_python() -> None:
    for page in ("README.md", "docs/reference/python.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert [compile(block, page, "exec") for block in blocks], f"{page} has one at least"


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first column of the table of a page whose head begins with ``heading``."""
    table = (ROOT / page).read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)[(`]", line.split("|")[1])}


def test_the_page_of_python_has_every_option_of_a_worker_and_of_a_list() -> None:
    of_worker = set(WorkerOptions.__annotations__) - set(UntrackedOptions.__annotations__)
    assert first_cells("docs/reference/python.md", "option of `@app.worker`") == of_worker
    assert first_cells("docs/reference/python.md", "option") == set(Options.model_fields)


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
