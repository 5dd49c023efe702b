"""What Flask compiles of its routes for the building of addresses, compiled when one is built.

Each test of the API has an application of its own, and that took four fifths of the processor time of a small one.
"""

from __future__ import annotations

from typing import Any

from werkzeug.routing.rules import Rule


def compile_late() -> None:
    """Routes that are made from now on are so."""
    at_once = Rule._compile_builder

    def late(self: Rule, append_unknown: bool = True) -> Any:
        made: list[Any] = []

        def build(rule: Rule, /, **values: Any) -> Any:
            if not made:
                made.append(at_once(self, append_unknown))
            return made[0](rule, **values)

        return build

    Rule._compile_builder = late  # type: ignore[method-assign]
