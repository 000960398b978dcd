"""`collage-monitor` with other fixed limits: `python -m tests.server.limited '{"idle_seconds": 1}' serve …`."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from functools import partial

from collage_server.command import serve as command
from collage_server.settings import FixedLimits

__all__ = ["limit_servers", "limits_and_variables"]

_LIMITS = {entry.name for entry in dataclasses.fields(FixedLimits)}


def limits_and_variables(given: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """(the fixed limits among `given` as JSON, the settings among them as environment variables)."""
    limits = {name: value for name, value in given.items() if name in _LIMITS}
    rest = {name: value for name, value in given.items() if name not in _LIMITS}
    return json.dumps(limits), {f"COLLAGE_SERVER_{name.upper()}": str(value) for name, value in rest.items()}


def limit_servers(limits: str) -> None:
    """Make every server that this process starts use these fixed limits."""
    chosen = FixedLimits(**json.loads(limits))
    command.make_store = partial(command.make_store, limits=chosen)  # type: ignore[attr-defined]
    command.Server = partial(command.Server, limits=chosen)  # type: ignore[misc, assignment]


if __name__ == "__main__":
    from collage_monitor.command import main

    limit_servers(sys.argv.pop(1))
    main()
