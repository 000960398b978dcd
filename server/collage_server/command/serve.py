"""`collage-monitor serve`: the server in this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import math
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
import uvicorn
from click.core import ParameterSource
from fastapi import FastAPI

from collage_monitor.command import VerbGroup
from collage_monitor.local import LOOPBACK_HOSTS, ensure_token, require_free, web_address
from collage_server.app import create_app, make_store
from collage_server.errors import StoreUnusable
from collage_server.logs import configure
from collage_server.settings import FIXED_LIMITS, FixedLimits, Settings, settings_from_environment
from collage_server.store import Store
from collage_server.web.protocol import BoundedProtocol, ConnectionLimits

__all__ = ["Server", "serve", "uvicorn_config"]

_LOG: Final = logging.getLogger(__name__)
_SPARE_FILES: Final = 256
"""Open files beside connections: the database, its log, its readers."""
_ARENA_MAX: Final = -8
"""M_ARENA_MAX of glibc's malloc.h."""


@click.group("serve", cls=VerbGroup, invoke_without_command=True, subcommand_metavar="[VERB ...]")
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on. Default: 7420.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder: database and token.")
@click.option(
    "--allowed-host", "allowed_hosts", multiple=True, help="Another host name under which clients reach it."
)
@click.option("--database", help="postgresql://USER@HOST/NAME. Default: SQLite in the folder.")
@click.option(
    "--memory",
    help="Most memory that the server may use, such as 512M. Default: half of the machine's, at most 4G.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File that holds the token. Default: `token` in the folder.",
)
@click.option("--no-auth", is_flag=True, help="Require no token; allowed on loopback only.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Format of log lines. Default: text.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
@click.option("--print-settings", is_flag=True, help="Print the settings with secrets masked, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
@click.pass_context
def serve(context: click.Context, /, print_settings: bool, as_json: bool, **flags: Any) -> None:
    """Run the server: it takes in reports, stores them and answers questions about them. Ctrl-C stops, after the
    last commit. With a verb, run the dashboard or the MCP server in its place."""
    if (verb := context.invoked_subcommand) is not None:
        if any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in context.params):
            raise click.UsageError(f"options before {verb} are the server's: write them behind `serve {verb}`")
        return
    settings = _settings(**flags)
    if print_settings:
        click.echo(json.dumps(settings.masked(), indent=2))
        return
    configure(settings.log_format, settings.log_level, [settings.token or "", settings.oidc_client_secret or ""])
    _share_one_heap()
    if settings.host not in LOOPBACK_HOSTS:
        _LOG.warning(
            "plain HTTP on %s: tokens and reports travel readable; put a proxy with TLS before it", settings.host
        )
    require_free(settings.host, settings.port, "--port")
    store = make_store(settings)
    try:
        store.open()
    except StoreUnusable as error:
        raise click.ClickException(error.message) from error
    with contextlib.suppress(KeyboardInterrupt):
        Server(settings, store, as_json).run()


def _settings(folder: Path | None, token_file: Path | None, no_auth: bool, **flags: Any) -> Settings:
    if no_auth and token_file is not None:
        raise click.UsageError("--no-auth asks for no token and --token-file names one; give one of the two")
    if token_file is not None:
        flags |= {"token": _read_token(token_file), "no_auth": False}
    elif no_auth:
        flags["no_auth"] = True
    flags["allowed_hosts"] = flags.get("allowed_hosts") or None
    return settings_from_environment(own_token=_own_token, folder=folder, **flags)


def _own_token(folder: Path) -> str:
    try:
        return ensure_token(folder)
    except OSError as error:
        raise click.ClickException(
            f"{folder} cannot hold the server's token: {error}; name a folder that may be written with --dir"
        ) from error


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"--token-file {path} cannot be read: {error}") from error
    if not token:
        raise click.ClickException(f"--token-file {path} is empty; write a token into it, or leave the flag out")
    return token


def uvicorn_config(app: FastAPI, settings: Settings, limits: FixedLimits = FIXED_LIMITS) -> uvicorn.Config:
    """How uvicorn serves the application."""
    connections = ConnectionLimits(limits.idle_seconds, _connections(limits.connections))
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(BoundedProtocol, limits=connections),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        server_header=False,
        # Clients reuse connections for 5 seconds, too: with uvicorn's own 5, a request could meet a closing one.
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        # Half of the time for requests under way; the other half commits what they left (`app`).
        timeout_graceful_shutdown=max(round(limits.shutdown_seconds / 2), 1),
    )


def _share_one_heap() -> None:
    """Let all threads use one heap, where malloc is glibc's.

    By default each thread has its own and keeps the memory of large bodies and questions, which doubles the total.
    Arrow's own allocator does likewise, and here the threads change within one export.
    """
    with contextlib.suppress(ImportError):
        arrow: Any = import_module("pyarrow")
        arrow.set_memory_pool(arrow.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _connections(wanted: int) -> int:
    """As many connections as there may be open files for, at most `wanted`; the soft limit is raised."""
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(min(wanted, most - _SPARE_FILES), 1)


class Server(uvicorn.Server):
    """The process that serves: uvicorn that prints its address once it listens."""

    def __init__(self, settings: Settings, store: Store, as_json: bool, limits: FixedLimits = FIXED_LIMITS) -> None:
        self.settings = settings
        self._as_json = as_json
        super().__init__(uvicorn_config(create_app(settings, store=store, limits=limits), settings, limits))

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.started:
            return
        # These objects stay for good: unfrozen, each full collection scans them for 70 ms, and every request waits.
        gc.collect()
        gc.freeze()
        port = self.servers[0].sockets[0].getsockname()[1]
        url = web_address(self.settings.host, port)
        if self._as_json:
            click.echo(json.dumps({"server_url": url, "dir": str(self.settings.folder)}))
        else:
            click.echo(f"server     {url}\ndata       {self.settings.folder}")
