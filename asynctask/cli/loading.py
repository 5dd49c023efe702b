"""Finding the application that ``-A`` names, and the example that the demo runs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from asynctask.errors import ConfigError

if TYPE_CHECKING:
    from asynctask.app import AsyncTask

__all__ = ["BadTarget", "examples_folder", "load_app", "load_file"]


class BadTarget(ConfigError):
    """What ``-A`` names cannot be loaded, or is no application."""

    code = "bad_target"


def load_app(target: str) -> AsyncTask:
    """The application at ``module:attribute`` or ``path/to/file.py:attribute``; the attribute is ``app`` by default.

    The current folder is put on ``sys.path``, as flask and celery do. Raises :class:`BadTarget`.
    """
    from asynctask.app import AsyncTask

    name, colon, attribute = target.rpartition(":")
    if not colon:
        name, attribute = target, "app"
    if not name or not attribute:
        raise BadTarget(f"-A {target!r} names no application: write module:attribute or path/to/file.py:attribute")
    module = load_file(Path(name)) if name.endswith(".py") else _load_module(name)
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, AsyncTask):
        return found
    there = sorted(key for key, value in vars(module).items() if isinstance(value, AsyncTask))
    hint = f"it has {', '.join(f'{name}:{key}' for key in there)}" if there else "it has no AsyncTask() at its top level"
    what = "is not there" if found is None else f"is a {type(found).__name__}, no AsyncTask"
    raise BadTarget(f"-A {target}: {attribute!r} {what}; {hint}")


def load_file(path: Path) -> ModuleType:
    """Imports a Python file, with its own folder on ``sys.path``. Raises :class:`BadTarget`."""
    path = path.resolve()
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    there = sys.modules.get(path.stem)
    if there is not None and getattr(there, "__file__", None) == str(path):
        return there
    # A file called json.py must not become the module json of everybody else.
    taken = there is not None or importlib.util.find_spec(path.stem) is not None
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" if taken else path.stem
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _on_path(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BadTarget(_why(str(path), error)) from error
    return module


def _load_module(name: str) -> ModuleType:
    _on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise BadTarget(
                f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages;"
                " a file is written path/to/file.py:app"
            ) from error
        raise BadTarget(_why(name, error)) from error


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _why(name: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}, line {error.lineno})"
    return f"{name} cannot be imported: {type(error).__name__}: {error}{where}"


def examples_folder() -> Path:
    """Where the examples are: inside the installed package, or beside it in a checkout. Raises :class:`BadTarget`."""
    package = Path(str(resources.files("asynctask")))
    for folder in (package / "_examples", package.parent / "examples"):
        if (folder / "promotions.py").is_file():
            return folder
    raise BadTarget("the examples are not installed with the package; install asynctask from its wheel")
