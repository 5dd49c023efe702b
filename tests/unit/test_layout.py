"""The layout holds: layers, the number of modules, short functions, no ambient time or chance, nothing at import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("asynctask", "webapi")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]

MODULES = 170
FUNCTION_LINES = 50
KERNEL = ("core", "ledger", "middleware", "runtime")
FIELDS = 20

# Each is longer than the limit for the reason beside it; one that is not any more must leave the list.
LONG_FUNCTIONS = {
    "asynctask/ledger/progress.py:_progress_object": "one object of the contract, member by member",
}

AMBIENT = {
    "time": {"sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "random": {"*"},
    "secrets": {"*"},
    "uuid": {"*"},
    "os": {"urandom", "getrandom"},
}
AMBIENT_ALLOWED = {
    "asynctask/clock.py": "the one module that asks the machine",
    "asynctask/supervisor.py:time.monotonic": "a default; the clock module is a tenth of its memory",
    "asynctask/database/notify.py:os.urandom": "no two signals are equal, also where an Ids repeats",
    "asynctask/runtime/launcher.py:random.shuffle": "draws the order of queues by weight; no outcome depends on it",
}

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), filename=name)


def qualified(node: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below ``node`` with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield above + child.name, child
            yield from qualified(child, f"{above}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from qualified(child, f"{above}{child.name}.")
        else:
            yield from qualified(child, above)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = dotted(node.value)
        return f"{above}.{node.attr}" if above else ""
    return ""


# -- layers


def test_imports_go_one_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- sizes


def test_a_new_concept_is_a_module_and_a_part_of_one_is_not() -> None:
    assert len(NAMES) <= MODULES, f"{len(NAMES)} modules: join what has to be read together, however long it grows"


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest collects one of them, and reports the other as an error only where it collects both."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_function_is_short_or_its_length_has_a_reason() -> None:
    long = {}
    for name in NAMES:
        for function, node in qualified(tree(name)):
            # The signature and the docstring are for the reader of the docs; what is counted is what has to be understood.
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > FUNCTION_LINES:
                long[f"{name}:{function}"] = lines
    assert long.keys() == LONG_FUNCTIONS.keys(), f"split these, or give the reason in LONG_FUNCTIONS: {long}"


def test_the_list_of_exceptions_names_nothing_that_is_gone() -> None:
    for entry in AMBIENT_ALLOWED:
        name, _, used = entry.partition(":")
        assert not used or used in {what for what, _ in ambient(name)}, f"{entry} is gone: take it from AMBIENT_ALLOWED"


# -- time and chance


def ambient(name: str) -> Iterator[tuple[str, int]]:
    """(what, line) of every use of the machine's clock or randomness."""
    imported = {
        alias.asname or alias.name for node in ast.walk(tree(name)) if isinstance(node, ast.Import) for alias in node.names
    }
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module in AMBIENT:
            taken = {alias.name for alias in node.names} & AMBIENT[node.module]
            yield from ((f"{node.module}.{each}", node.lineno) for each in taken)
        if isinstance(node, ast.Attribute):
            owner, _, what = dotted(node).rpartition(".")
            module = owner.rpartition(".")[2]
            used = AMBIENT.get(module, set())
            if what in used or ("*" in used and owner in imported):
                yield f"{module}.{what}", node.lineno


def test_only_the_clock_module_asks_the_machine_for_time_and_chance() -> None:
    found = [
        f"{name}:{line} uses {what}"
        for name in NAMES
        for what, line in ambient(name)
        if name not in AMBIENT_ALLOWED and f"{name}:{what}" not in AMBIENT_ALLOWED
    ]
    assert not found, "take a Clock or Ids as an argument (asynctask/clock.py)"


# -- what came as data is never executed


def test_nothing_that_came_as_data_can_be_executed() -> None:
    for name in NAMES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Call):
                assert dotted(node.func) not in FORBIDDEN_CALLS, f"{name}:{node.lineno} calls {dotted(node.func)}"
            if isinstance(node, ast.Import):
                assert not {a.name.partition(".")[0] for a in node.names} & FORBIDDEN_MODULES, f"{name}:{node.lineno}"
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN_MODULES, f"{name}:{node.lineno}"


def test_modules_are_imported_by_name_only_where_an_operator_names_the_application() -> None:
    allowed = {"asynctask/cli/options.py", "asynctask/integrations/django.py", "webapi/wsgi.py"}
    users = {
        name
        for name in NAMES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute)
        and dotted(node) in ("importlib.import_module", "importlib.util.module_from_spec")
    }
    assert users <= allowed, f"{users - allowed} import by name: what is imported must not come from a payload"


# -- docs


def test_every_module_says_what_it_is_for() -> None:
    silent = {name for name in NAMES if not ast.get_docstring(tree(name))}
    assert silent == {"asynctask/_version.py"}


# Declarations whose fields say it; a docstring there would stand in openapi.json as the schema's description.
SCHEMAS = {"webapi/shapes.py"}


def test_what_a_module_offers_has_a_docstring() -> None:
    for name in sorted(set(NAMES) - SCHEMAS):
        for node in tree(name).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if "overload" not in map(ast.unparse, node.decorator_list):  # its implementation has it
                assert ast.get_docstring(node), f"{node.name} of {name} is offered without a docstring"


# -- nothing happens at import

_AUDIT = """
import importlib, json, os, sys, threading

# What third-party packages do when they are imported is theirs: they are imported first, unwatched.
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
modules = json.loads(sys.argv[1])
seen, watching = [], True
standard = os.path.realpath(os.path.dirname(os.__file__))
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, args):
    if not watching:
        return
    if event == "open":
        path, mode, flags = args
        writes = (flags or 0) & FLAGS or (isinstance(mode, str) and set(mode) & set("wax+"))
        here = isinstance(path, str) and os.path.realpath(path).startswith(os.getcwd() + os.sep)
        if (writes or here) and not str(path).endswith((".pyc", ".py")) and "__pycache__" not in str(path):
            seen.append(f"open {path} {mode}")
    elif event.startswith(("socket.connect", "socket.bind", "subprocess.", "os.fork", "os.mkdir", "os.putenv")):
        seen.append(f"{event} {args!r:.200}")
    elif event == "sqlite3.connect":
        seen.append(f"{event} {args!r:.200}")

sys.addaudithook(watch)
threads, environ = threading.active_count(), dict(os.environ)
for name in modules:
    importlib.import_module(name)
watching = False
print(json.dumps({"seen": seen, "threads": threading.active_count() - threads, "environ": dict(os.environ) == environ,
                  "files": os.listdir(".")}))
"""


def module_names() -> list[str]:
    """Every module of the packages whose optional third party, if it has one, is installed."""
    names = []
    for name in NAMES:
        dotted_name = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        engine = dotted_name.rpartition(".")[2]
        optional = dotted_name == f"asynctask.integrations.{engine}" and engine in (
            "celery",
            "django",
            "dramatiq",
            "huey",
            "rq",
        )
        if dotted_name != "asynctask.__main__" and (not optional or importlib.util.find_spec(engine) is not None):
            names.append(dotted_name)
    return names


def third_parties() -> list[str]:
    """Whatever else the packages import at the top of a module, as far as it is installed."""
    found = set()
    for name in NAMES:
        for node in tree(name).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module)
    ours = {*PACKAGES, "__future__"}
    return sorted(n for n in found if n.partition(".")[0] not in ours and importlib.util.find_spec(n.partition(".")[0]))


def python(folder: Path, code: str, *args: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_every_module_opens_nothing_starts_nothing_and_makes_nothing(tmp_path: Path) -> None:
    found = json.loads(python(tmp_path, _AUDIT, json.dumps(module_names()), json.dumps(third_parties())))
    assert found == {"seen": [], "threads": 0, "environ": True, "files": []}


def test_what_is_watched_at_import_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(
        "import sqlite3, threading\nopen('made', 'w').close()\nsqlite3.connect('x.db').close()\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{_AUDIT}"
    folder = tmp_path / "empty"
    folder.mkdir()
    found = json.loads(python(folder, code, json.dumps(["guilty"]), "[]"))
    assert [entry.split()[0] for entry in found["seen"]] == ["open", "sqlite3.connect"]
    assert "made" in found["files"]


@pytest.mark.parametrize("statement", ["import asynctask", "from asynctask import NormalException, current_job, Priority"])
def test_job_code_that_imports_the_package_alone_pays_for_neither_sqlalchemy_nor_flask(
    tmp_path: Path, statement: str
) -> None:
    code = f"{statement}\nimport sys; print([n for n in ('sqlalchemy', 'flask', 'pydantic', 'redis') if n in sys.modules])"
    assert python(tmp_path, code).strip() == "[]"


def test_no_value_of_the_kernel_has_more_fields_than_one_can_keep_in_mind() -> None:
    too_many = []
    for name in NAMES:
        if name.split("/")[0] != "asynctask" or name.split("/")[1] not in KERNEL:
            continue
        module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and is_dataclass(kind):
                count = len(fields(kind))
                too_many += [f"{kind.__qualname__}: {count}"] if count > FIELDS else []
    assert not too_many, "\n".join(too_many)
