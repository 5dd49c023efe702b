"""What people forget: every setting, command and flag stands in the docs; what the README and Makefile name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

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


@pytest.mark.parametrize("name", [field.name for field in fields(Config)])
def test_every_setting_stands_in_the_table_of_settings(name: str) -> None:
    row = setting_row(name)
    assert row in (ROOT / "docs/configuration.md").read_text().splitlines(), (
        f"put this line into docs/configuration.md:\n{row}"
    )


def test_the_table_of_settings_has_no_setting_that_does_not_exist() -> None:
    named = re.findall(r"^\| `(\w+)` \| `ASYNCTASK_", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(Config))


@pytest.mark.parametrize(("name", "command"), list(commands(build())))
def test_every_command_has_its_section_and_every_flag_of_its_own_is_in_it(name: str, command: click.Command) -> None:
    text = (ROOT / "docs/cli.md").read_text()
    heading = f"## `asynctask {name}`\n"
    assert heading in text, f"docs/cli.md needs a section {heading!r}"
    section = text.partition(heading)[2].partition("\n## ")[0]
    for option in command.params:
        if isinstance(option, click.Option) and not isinstance(option, SettingOption) and option.name != "as_json":
            longest = max(option.opts, key=len)
            assert f"`{longest}" in section, f"the section of {name} in docs/cli.md does not tell about {longest}"


def test_every_command_says_in_its_help_what_it_does() -> None:
    for name, command in commands(build()):
        assert command.help, f"{name} has no help"
        assert all(o.help for o in command.params if isinstance(o, click.Option)), f"a flag of {name} has no help"


def test_every_target_of_the_makefile_stands_in_its_help() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), f"{target} needs a ## description in the Makefile"


@pytest.mark.parametrize("page", sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))))
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}, which is not there"


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_every_python_example_is_python(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert [compile(block, page, "exec") for block in blocks], "there is one at least"


def first_cells(page: str, heading: str) -> set[str]:
    """The names in the first column of the table of a page whose head begins with ``heading``."""
    table = (ROOT / page).read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)[(`]", line.split("|")[1])}


def test_the_page_of_python_has_every_option_of_a_worker_and_of_a_list() -> None:
    of_worker = set(WorkerOptions.__annotations__) - set(UntrackedOptions.__annotations__)
    assert first_cells("docs/python.md", "option of `@app.worker`") == of_worker
    assert first_cells("docs/python.md", "option") == set(Options.model_fields)


def test_the_page_of_python_has_every_method_of_a_task() -> None:
    text = (ROOT / "docs/python.md").read_text()
    for name in vars(TaskHandle):
        assert name.startswith("_") or re.search(rf"[`.]{name}[(`]", text), f"docs/python.md lacks task.{name}"


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
