"""What runs were configured with: whether it is the same but for seeds, and in which entries it differs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["configuration_of", "differing", "entries"]

_SEED: Final = re.compile(r"(.*[^a-z])?seed", re.IGNORECASE)
_LABEL: Final = re.compile(r"run_?(name|id)|(output|logging|log|save)_?(dir|path|folder)", re.IGNORECASE)
_LABELS_OF_RUN: Final = frozenset({"name", "id", "notes", "tags"})
"""Entries that name a run or say where it writes: no training depends on them. A data set has a name, too."""
_LONGEST: Final = 200


def configuration_of(project: str, config: Mapping[str, Any]) -> str:
    """The same for runs of one project whose configurations differ in nothing but seeds, names and places.

    A seed is an entry, at any depth, whose name is or ends with the word "seed".
    """
    text = json.dumps([project, _compared(config)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's entries that are compared, by their path: {"optimizer.lr": 0.001}."""
    return dict(_flattened(_compared(config), ""))


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The entries in which these configurations differ, in the order in which they first stand."""
    found = [entries(config) for config in configs]
    names = dict.fromkeys(name for config in found for name in config)
    return [name for name in names if any(_differs(config, found[0], name) for config in found[1:])]


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return (name in one) != (name in other) or one.get(name) != other.get(name)


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without(entry) for name, entry in config.items() if not _is_left_out(name, _LABELS_OF_RUN)}


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(entry) for name, entry in value.items() if not _is_left_out(name)}
    return [_without(entry) for entry in value] if isinstance(value, list) else value


def _is_left_out(name: str, labels: frozenset[str] = frozenset()) -> bool:
    return name in labels or _SEED.fullmatch(name) is not None or _LABEL.fullmatch(name) is not None


def _flattened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flattened(entry, f"{path}.{name}" if path else str(name))
    elif path:
        plain = isinstance(value, int | float | bool) or value is None
        yield path, value if plain else _short(value if isinstance(value, str) else json.dumps(value, default=str))


def _short(text: str) -> str:
    """Long texts are told apart by their hash, which keeps an answer about many runs small."""
    if len(text) <= _LONGEST:
        return text
    told = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: _LONGEST - 10]}… {told}"
