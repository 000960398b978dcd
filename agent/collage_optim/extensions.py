"""Strategies and rules that other packages add through entry points: found by group and name, loaded once.

`strategies.py` and `update_rules.py` ask for them. The optimizers are installed without the contract, whose
`collage_monitor/extensions.py` does the same for its own groups; `tests/optim/test_extensions.py` holds that both
say the same.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

__all__ = ["extensions"]


@cache
def extensions(group: str) -> dict[str, Any]:
    """Name → object of everything that installed packages add to `group`, in the order of their names.

    Raises ValueError if an entry cannot be imported, or two packages use one name.
    """
    found: dict[str, Any] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name in found:
            raise ValueError(f"two packages add {point.name!r} to {group}: uninstall one, or rename its entry")
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise ValueError(
                f"{group} {point.name!r} ({point.value}) cannot be loaded: {error}; uninstall or mend its package"
            ) from error
    return found
