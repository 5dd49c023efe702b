"""Functions in front of those of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def noting(calls: list[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """The function, each of whose calls is noted by its positional arguments first."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inner(*args, **kwargs)

    return noted
