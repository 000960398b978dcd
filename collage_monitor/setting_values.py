"""One reader of settings: values from the environment or arguments, converted to the type of their field, or an
error.

A field says what it must be, and what to give, by the description of a `msgspec.Meta`: the words behind `must be`.

`collage_agent.run_settings` and `collage_server.settings` read their fields by it, and hold the names and defaults
themselves.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from collage_monitor.errors import CollageError

__all__ = ["SettingsError", "WebAddress", "kinds_of", "masked", "read_setting"]

_IN_ADDRESS: Final = re.compile(r"(://[^/@\s:]*:)\S*@")
_IN_QUERY: Final = re.compile(r"(\b(?:ssl)?password=)[^&\s]*", re.IGNORECASE)
_YES_OR_NO: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}

WebAddress = Annotated[
    str,
    Meta(
        pattern=r"(?i)^https?://[^/\s@:][^/\s@]*(/\S*)?\Z",
        description="an http:// or https:// address; leave user and password out of it",
    ),
]


class SettingsError(CollageError, ValueError):
    """A setting that is missing, malformed, or unsafe in its combination."""


def kinds_of(settings: type, but: Collection[str] = ()) -> dict[str, Any]:
    """The annotated types of a dataclass's fields, by name, `but` for these."""
    hints = typing.get_type_hints(settings, include_extras=True)
    return {name: kind for name, kind in hints.items() if name not in but}


def read_setting(label: str, value: Any, kind: Any, *, is_text: bool = False, secret: bool = False) -> Any:
    """Read the value as `kind`. `is_text`: it is a variable's text, with commas between several values.

    Raises:
        SettingsError: it is no such value; the message names the label and what to set, but never a secret.
    """
    plain, wanted = _plain(kind)
    given = value
    if is_text and plain is bool:
        given = _YES_OR_NO.get(value.lower(), value)
    elif is_text and typing.get_origin(plain) is tuple:
        given = tuple(filter(None, (part.strip() for part in value.split(","))))
    strict = plain is bool or not is_text
    try:
        return msgspec.convert(given, kind, strict=strict, dec_hook=lambda made, old: made(old))
    except (msgspec.ValidationError, TypeError) as error:
        shown = "" if secret else f"={masked(value)!r:.200}"
        raise SettingsError(f"{label}{shown} must be {wanted or error}") from None


def _plain(kind: Any) -> tuple[Any, str | None]:
    """The type without its annotation and without None; and the words of the annotation."""
    wanted = None
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        metas = getattr(kind, "__metadata__", ())
        wanted = next((meta.description for meta in metas if meta.description), wanted)
        kind = typing.get_args(kind)[0]
    return kind, wanted


def masked(value: Any) -> Any:
    """A value for people to read: no password in addresses, paths as texts."""
    if isinstance(value, str):
        return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub(r"\1***@", value))
    return str(value) if isinstance(value, Path) else value
