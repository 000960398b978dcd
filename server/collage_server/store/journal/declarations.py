"""Limits on a stream's declaration of layers and statistics, and the storage of statistics unknown here.

`stream_store.py` calls it when a stream is registered; `run_view.py` asks what was dropped. The mark is stored, so
it is fixed (`tests/server/store/contract.py`, `sealing.py`; over HTTP `tests/server/test_ingest.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from collage_monitor import wire
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import statistic
from collage_server.errors import Unprocessable

__all__ = ["UNKNOWN_MARK", "check_declaration", "stored_name", "unknown_statistics"]

_MOST_ELEMENTS: Final = 2**53
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LONGEST_STATISTIC: Final = 448
"""So that "minimum METRIC", with the same label, is no longer than a name: else its run could not be sealed."""
UNKNOWN_MARK: Final = "?"
"""Stands before the stored name of a statistic that this server did not know: sealing drops its totals."""


def check_declaration(create: wire.StreamCreate) -> None:
    """Raise Unprocessable if the layers or statistics are too many, too large, too long or named twice."""
    for field, names in (
        ("layers", [layer.name for layer in create.layers]),
        ("statistics", create.statistics),
    ):
        limit = wire.LIMITS["layers_per_run" if field == "layers" else "statistics_per_stream"]
        if len(names) > limit:
            raise Unprocessable(f"{field}: {len(names)} entries, at most {limit}", field=field, limit=limit)
        if len(set(names)) != len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise Unprocessable(f"{field}: {twice!r} stands twice; name each once", field=field)
        if (odd := next(filter(_CONTROL.search, names), None)) is not None:
            raise Unprocessable(f"{field}: {odd[:80]!r} has a control character; leave it out", field=field)
    for layer in create.layers:
        if math.prod(layer.shape) > _MOST_ELEMENTS:
            raise Unprocessable(
                f"layers: {layer.name!r} of shape {layer.shape} has more than {_MOST_ELEMENTS} elements",
                field="layers",
                limit=_MOST_ELEMENTS,
            )
    for key in create.statistics:
        if len(key) > _LONGEST_STATISTIC:
            raise Unprocessable(
                f"statistics: {key[:80]!r}… has {len(key)} characters, at most {_LONGEST_STATISTIC}",
                field="statistics",
                limit=_LONGEST_STATISTIC,
            )


def stored_name(key: str) -> str:
    """The stored name of a declared statistic."""
    try:
        statistic(key)
    except CatalogueError:
        return UNKNOWN_MARK + key
    return key


def unknown_statistics(stored: Iterable[str]) -> list[str]:
    """The names of stored statistics whose totals are dropped."""
    return [key.removeprefix(UNKNOWN_MARK) for key in stored if key.startswith(UNKNOWN_MARK)]
