"""The configuration file of ``-C``: YAML in the form of Sidekiq's.

.. code-block:: yaml

    :concurrency: 10
    :timeout: 25
    :queues:
      - critical
      - [default, 2]
    production:
      :concurrency: 25

The colons are optional. Any AsyncTask setting may stand there too, by its name. A section applies in the environment of its
name, with precedence over the lines outside. Keys for Ruby alone are ignored and reported; unknown keys, and
unsupported ones that would change how jobs run, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from asynctask.config import QUEUE_NAME, Config, check_setting, setting_types
from asynctask.errors import ConfigError, TooLarge
from asynctask.logs import escaped
from asynctask.sidekiq.payload import nearest

MAX_FILE_BYTES: Final = 65_536
MAX_EVENTS: Final = 4_000
MAX_DEPTH: Final = 10
MAX_ALIASES: Final = 16
"""Of a file. Rails files use a few aliases; many, each of several others, are a YAML bomb."""

MAX_WEIGHT: Final = 1_000

_SIDEKIQ: Final[Mapping[str, str]] = {
    "concurrency": "concurrency",
    "queues": "queues",
    "strict": "strict_queues",
    "timeout": "shutdown_s",
    "poll_interval_average": "poll_interval_s",
    "average_scheduled_poll_interval": "poll_interval_s",
    "dead_max_jobs": "dead_max_jobs",
    "dead_timeout_in_seconds": "dead_timeout_s",
}
"""Sidekiq's names of settings."""

_FOR_RUBY: Final = frozenset(
    {"require", "verbose", "logfile", "pidfile", "daemon", "index", "tag", "labels", "environment"}
)
"""Keys of a Ruby process without effect on how jobs run."""

_UNSUPPORTED: Final[Mapping[str, str]] = {
    "capsules": "run a worker for each capsule, with its own queues and concurrency",
    "limits": "there is no limit for a single queue: run a worker for it, with a concurrency of its own",
    "max_retries": "say retry= where the worker is registered",
}
"""Unsupported keys that would change how jobs run, and the remedy."""


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """A parsed file: ``settings`` by the names of :class:`~asynctask.config.Config`, and ``passed_over``, the ignored keys
    for Ruby alone."""

    path: Path
    settings: Mapping[str, Any]
    passed_over: Sequence[str]


def read_worker_file(path: Path, environment: str, *, named: bool = False) -> WorkerFile:
    """Reads a file without executing anything in it.

    Arguments: ``environment``, whose section applies; ``named``: the user named it, so the section must exist.
    Raises :class:`ConfigError` that names the file and every wrong key; TooLarge.
    """
    document = _load(path)
    known = {*_SIDEKIQ, *(field.name for field in fields(Config))}
    outside, sections = _split_sections(document, known, path)
    wrong: list[str] = []
    base = _settings(outside, "", known, wrong)
    found = {name: _settings(lines, f"{name}: ", known, wrong) for name, lines in sections.items()}
    if named and environment not in sections:
        wrong.append(f"it has no section {environment!r}; there are: {', '.join(sections) or 'none'}")
    if wrong:
        raise ConfigError(f"{path}: {'; '.join(wrong)}")
    passed_over = sorted({name for lines in (outside, *sections.values()) for name in lines if name in _FOR_RUBY})
    return WorkerFile(path, _merge(base, found.get(environment, {})), passed_over)


def _merge(outside: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    if "queues" in section:  # their order belongs to them
        outside = {name: value for name, value in outside.items() if name != "strict_queues"}
    return {**outside, **section}


# -- reading


def _load(path: Path) -> dict[str, Any]:
    """The document: a mapping whose keys are texts without leading colons."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; name the file with -C") from None
    if len(raw) > MAX_FILE_BYTES:
        raise TooLarge(
            f"{path} has more than {MAX_FILE_BYTES:,} bytes, so it is no configuration: name another file with -C"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8: save it as UTF-8") from None
    if "<%" in text:
        raise ConfigError(f"{path} holds Ruby code (<% %>), which is not executed here: write the value itself, or a flag")
    document = _parsed(text, path)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no settings: write one a line, such as concurrency: 10")
    return _plain_keys(document, path)


def _parsed(text: str, path: Path) -> Any:
    import yaml  # an optional dependency

    try:
        _refuse_bombs(yaml.parse(text, Loader=yaml.SafeLoader), path)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        message = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path}{where}: {_error_text(message)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        raise ConfigError(f"{path} is no YAML: {_error_text(error)}") from None


def _error_text(problem: Any) -> str:
    text = _shown(" ".join(str(problem).split()), 200)
    if "constructor for the tag" in text:
        return f"{text}: objects are not read from a file, write plain values"
    return text


def _shown(value: object, longest: int) -> str:
    """A part of the file in the text of an error, at most so many characters of it."""
    text = str(value)
    return escaped(text if len(text) <= longest else f"{text[: longest - 1]}…")


def _refuse_bombs(events: Any, path: Path) -> None:
    depth = aliases = 0
    for count, event in enumerate(events):
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        aliases += kind == "AliasEvent"
        if count > MAX_EVENTS or depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise ConfigError(
                f"{path} is too large or too deep for a configuration: at most {MAX_EVENTS:,} values, {MAX_DEPTH} levels"
                f" and {MAX_ALIASES} aliases"
            )


def _plain_keys(mapping: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in mapping.items():
        if not isinstance(key, str) or not key.removeprefix(":"):
            raise ConfigError(f"{path}: {_shown(repr(key), 80)} is no name of a setting")
        name = key.removeprefix(":")
        if name in plain:
            raise ConfigError(f"{path}: {name[:80]} stands there twice, with a colon and without: keep one")
        plain[name] = value
    return plain


# -- meaning


def _split_sections(
    document: Mapping[str, Any], known: set[str], path: Path
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The lines outside of sections, and the sections: mappings whose name is no known key."""
    outside: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in document.items():
        if isinstance(value, dict) and name not in known and name not in _UNSUPPORTED and name not in _FOR_RUBY:
            sections[name] = _plain_keys(value, path)
        else:
            outside[name] = value
    return outside, sections


def _settings(lines: Mapping[str, Any], before: str, known: set[str], wrong: list[str]) -> dict[str, Any]:
    """The settings of the lines; appends errors to ``wrong``."""
    found: dict[str, Any] = {}
    for name, value in lines.items():
        shown = f"{before}{name[:80]}"
        if name in _UNSUPPORTED:
            wrong.append(f"{shown} is not supported: {_UNSUPPORTED[name]}")
        elif name in known:
            setting = _SIDEKIQ.get(name, name)
            if setting in found:
                wrong.append(f"{shown} says again what another line says: keep one")
            try:
                _add_setting(found, setting, value, lines)
            except ConfigError as error:
                wrong.append(f"{shown}: {_shown(error, 300)}")
        elif name not in _FOR_RUBY:
            wrong.append(f"{shown} is no setting{nearest(name, {*known, *_FOR_RUBY, *_UNSUPPORTED})}")
    return found


def _add_setting(found: dict[str, Any], setting: str, value: Any, lines: Mapping[str, Any]) -> None:
    if setting == "queues" and not isinstance(value, str):
        found["queues"], in_order = _queues(value)
        if not ({"strict", "strict_queues"} & lines.keys()):
            found["strict_queues"] = in_order
        return
    if setting_types()[setting] is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{setting} must be a number")
    check_setting(setting, value)
    found[setting] = value


def _queues(value: Any) -> tuple[str, bool]:
    """The setting ``queues``, and whether its order is strict, as it is if no queue has a weight."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError("write a list of queues: a name, or [name, weight]")
    weights: dict[str, int | None] = {}
    for pair in pairs:
        name, weight = _queue(pair)
        if name in weights:
            raise ConfigError(f"the queue {name} stands there twice: give it a weight instead, [{name}, 2]")
        weights[name] = weight
    in_order = not any(weights.values())
    return " ".join(name if in_order else f"{name},{weight or 1}" for name, weight in weights.items()), in_order


def _queue(pair: Any) -> tuple[str, int | None]:
    if isinstance(pair, str):
        name, comma, text = pair.partition(",")
        weight: Any = int(text) if text.strip().isdecimal() and len(text) < 10 else text if comma else None
    elif isinstance(pair, list | tuple) and 1 <= len(pair) <= 2:
        name, weight = pair[0], pair[1] if len(pair) == 2 else None
    else:
        name, weight = pair, None
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name.strip().removeprefix(":")):
        raise ConfigError(
            f"{_shown(repr(name), 80)} is no name of a queue: letters, digits and _ : . - (in quotes if need be)"
        )
    if weight is not None and (type(weight) is not int or not 0 <= weight <= MAX_WEIGHT):
        raise ConfigError(f"the weight of {name} must be a whole number up to {MAX_WEIGHT}, not {_shown(repr(weight), 80)}")
    return name.strip().removeprefix(":"), weight
