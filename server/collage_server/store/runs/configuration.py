"""Which runs have one configuration, seeds aside."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

from collage_server.store.records import RunRecord

__all__ = ["configuration_of"]

_SEED: Final = re.compile(r"(.*[^a-z])?seed", re.IGNORECASE)


def configuration_of(record: RunRecord) -> str:
    """The same for runs of one strategy and dtype whose configurations differ in nothing but seeds.

    A seed is an entry, at any depth, whose name is or ends with the word "seed".
    """
    text = json.dumps([record.strategy, record.dtype, _without_seeds(record.config)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_seeds(entry) for name, entry in value.items() if not _SEED.fullmatch(name)}
    return [_without_seeds(entry) for entry in value] if isinstance(value, list) else value
