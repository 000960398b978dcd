"""Where things live on one machine: the data folder, its token, the server that `up` keeps running, the log-in.

The agent, the commands and the dashboard all find a local server by it. Names of files in the data folder are
fixed, because versions share the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from collage_monitor.errors import CollageError

__all__ = [
    "DASHBOARD_PORT",
    "DEFAULT_DASHBOARD_URL",
    "DEFAULT_SERVER_URL",
    "LOOPBACK_HOSTS",
    "LocalServer",
    "Login",
    "SERVER_PORT",
    "announced",
    "data_folder",
    "ensure_token",
    "find_token",
    "forget_login",
    "is_loopback",
    "keep_login",
    "known_server",
    "local_server",
    "read_login",
    "read_token",
    "require_free",
    "sendable_token",
    "server_address",
    "token_path",
    "web_address",
    "write_private",
]

SERVER_PORT: Final = 7420
DASHBOARD_PORT: Final = 7421
DEFAULT_SERVER_URL: Final = f"http://127.0.0.1:{SERVER_PORT}"
DEFAULT_DASHBOARD_URL: Final = f"http://127.0.0.1:{DASHBOARD_PORT}"
LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
"""The names under which this machine alone is reached."""
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


def sendable_token(token: str) -> str:
    """The token without white space around it.

    Raises:
        CollageError: no header can carry it.
    """
    word = token.strip()
    if not word.isascii() or not word.isprintable() or " " in word:
        # The value itself is a secret and stays out of messages.
        raise CollageError("the token is not the printable ASCII text, without spaces, that the server gave out")
    return word


def ensure_token(folder: Path) -> str:
    """The token in `folder`, made on first use: 256 random bits in a file of mode 0600."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = token_path(folder)
    if not path.exists():
        _make_token(path)
    known = read_token(folder)
    if known is None:
        raise PermissionError(f"{path} is empty or unreadable; remove it to make a new token")
    return known


def _make_token(path: Path) -> None:
    """Write the whole file at once: if several start together, all find the first one's token."""
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


def write_private(path: Path, text: str) -> None:
    """Replace the file as a whole, by one that its user alone may read."""
    # mkstemp makes the file with mode 0600.
    descriptor, made = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(made, path)


@dataclass(frozen=True)
class LocalServer:
    """A server of this user on this machine, as `up` announces it in a file."""

    server_url: str
    dashboard_url: str
    folder: str
    process_id: int


def local_server(environment: Mapping[str, str] | None = None) -> LocalServer | None:
    """The server that `up` keeps running; None if no such process lives."""
    try:
        found = LocalServer(**json.loads(_announcement(environment).read_text(encoding="utf-8")))
        if sys.platform != "win32":
            os.kill(found.process_id, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found if Path(found.folder).is_dir() else None


@contextlib.contextmanager
def announced(server: LocalServer, environment: Mapping[str, str] | None = None) -> Iterator[bool]:
    """Let this user's programs find the server and its token while the context is open.

    Yields False if an earlier server is still announced: programs then go on finding that one.
    """
    path = _announcement(environment)
    if local_server(environment) is not None:
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, json.dumps(asdict(server)))
    try:
        yield True
    finally:
        if local_server(environment) == server:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Login:
    """The record of `collage-monitor login` for this user: a server, the token for it, and its dashboard's
    address."""

    server_url: str
    token: str
    dashboard_url: str | None = None


def read_login(environment: Mapping[str, str] | None = None) -> Login | None:
    """The stored log-in; None if nobody logged in. A file that `login` did not write does not count."""
    path = _login_path(environment)
    try:
        return Login(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def keep_login(login: Login, environment: Mapping[str, str] | None = None) -> Path:
    """Write the log-in in place of an older one, in a file that this user alone may read; returns the file."""
    path = _login_path(environment)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, json.dumps(asdict(login)))
    return path


def forget_login(environment: Mapping[str, str] | None = None) -> bool:
    """Remove the log-in; False if there was none."""
    path = _login_path(environment)
    known = path.exists()
    path.unlink(missing_ok=True)
    return known


def server_address(environment: Mapping[str, str] | None = None) -> str:
    """The default server: the one of `login`, else the one that `up` keeps running, else the default address."""
    if (login := read_login(environment)) is not None:
        return login.server_url
    found = local_server(environment)
    return found.server_url if found else DEFAULT_SERVER_URL


def find_token(
    server_url: str, folder: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> str | None:
    """The token of `login` for its server; for another server of this machine, the token in the folder that `up`
    names or in the data folder.

    None for any other server: a local token never leaves the machine.
    """
    login = read_login(environment)
    if login is not None and login.server_url.rstrip("/") == server_url.rstrip("/"):
        return login.token
    if not is_loopback(server_url):
        return None
    found = local_server(environment)
    named = found is not None and _port(found.server_url) == _port(server_url)
    token = read_token(Path(found.folder)) if found is not None and named else None
    return token or read_token(data_folder(folder, environment))


def known_server(environment: Mapping[str, str] | None = None) -> tuple[str, str | None]:
    """The default server and its token: those of COLLAGE_SERVER_URL and COLLAGE_TOKEN, otherwise of `login`,
    otherwise of the server that `up` keeps running, otherwise the default address."""
    values = os.environ if environment is None else environment
    address = values.get("COLLAGE_SERVER_URL") or server_address(environment)
    return address, values.get("COLLAGE_TOKEN") or find_token(address, environment=environment)


def is_loopback(url: str) -> bool:
    """Whether a URL points to this machine."""
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")


def web_address(host: str, port: int) -> str:
    """The URL of a service that listens on `host`; an IPv6 address gets brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def require_free(host: str, port: int, option: str) -> None:
    """Raise unless a service may listen there; port 0 means any free one.

    Raises:
        CollageError: the port is taken, or the host has no address here; the message names the option to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise CollageError(
            f"{host}:{port} cannot be listened on ({error.strerror}); stop what runs there, or choose another "
            f"{option}"
        ) from error


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _announcement(environment: Mapping[str, str] | None) -> Path:
    values = os.environ if environment is None else environment
    state = values.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "collage-monitor" / "server.json"


def _login_path(environment: Mapping[str, str] | None) -> Path:
    values = os.environ if environment is None else environment
    config = values.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "collage-monitor" / "login.json"
