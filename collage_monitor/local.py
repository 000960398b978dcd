"""Where things live on one machine: the data folder, its token, and the default addresses."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = [
    "DASHBOARD_PORT",
    "DEFAULT_DASHBOARD_URL",
    "DEFAULT_SERVER_URL",
    "SERVER_PORT",
    "data_folder",
    "ensure_token",
    "read_token",
    "token_path",
]

SERVER_PORT: Final = 7420
DASHBOARD_PORT: Final = 7421
DEFAULT_SERVER_URL: Final = f"http://127.0.0.1:{SERVER_PORT}"
DEFAULT_DASHBOARD_URL: Final = f"http://127.0.0.1:{DASHBOARD_PORT}"
_TOKEN_BYTES = 32


def data_folder(folder: str | Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """The folder that holds database, spool and token: the argument, else COLLAGE_DIR, else the user's data folder.

    It is not created here.
    """
    values = os.environ if environment is None else environment
    if folder is not None:
        return Path(folder).expanduser()
    if values.get("COLLAGE_DIR"):
        return Path(values["COLLAGE_DIR"]).expanduser()
    share = values.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(share).expanduser() / "collage-monitor"


def token_path(folder: Path) -> Path:
    """The file that holds the local server's token."""
    return folder / "token"


def read_token(folder: Path) -> str | None:
    """The token in `folder`, or None if there is none (yet) or it cannot be read."""
    try:
        return token_path(folder).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def ensure_token(folder: Path) -> str:
    """The token in `folder`, made on first use: 256 random bits in a file of mode 0600."""
    folder.mkdir(parents=True, exist_ok=True)
    path = token_path(folder)
    if not path.exists():
        _make_token(path)
    known = read_token(folder)
    if known is None:
        raise PermissionError(f"{path} is empty or unreadable; remove it to make a new token")
    return known


def _make_token(path: Path) -> None:
    """The whole file at once: of several that start together, all find that of the first."""
    descriptor, made = tempfile.mkstemp(prefix=".token-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        try:
            os.link(made, path)
        except FileExistsError:
            pass
        except OSError:  # A file system without hard links.
            os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
