"""Options and look-ups that all verbs of a server share: its address and token, and the run that a person means.

A verb that asks a server takes its options from here, so that all have the same (`tests/server/test_run_verbs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import click

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.terminal import clock, printable
from collage_monitor.connection import named_dashboard
from collage_monitor.errors import CollageError, NotFound
from collage_monitor.local import find_token, local_server, read_login, server_address
from collage_monitor.spelling import similar

__all__ = ["dashboard_of", "find_run", "open_client", "server_address_options", "server_options"]

_Function = TypeVar("_Function", bound=Callable[..., None])
_SEARCHED: Final = 500
_NAMED: Final = 5


def server_address_options(function: _Function) -> _Function:
    """Add the options for the server's address and the token."""
    for option in (
        click.option(
            "--token",
            envvar="COLLAGE_TOKEN",
            help="Token; default: the one kept by `login`, or the local server's.",
        ),
        click.option(
            "--server-url",
            envvar="COLLAGE_SERVER_URL",
            default=server_address,
            show_default="that of `login`, else the local server's",
        ),
    ):
        function = option(function)
    return function


def server_options(function: _Function) -> _Function:
    """The options that every verb which reads from a server takes."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
    return server_address_options(as_json(function))


def open_client(server_url: str, token: str | None) -> Client:
    """A client of the server, with the given token or the one known for this server."""
    return Client(server_url, token or find_token(server_url))


def dashboard_of(server_url: str) -> str | None:
    """The address of a server's dashboard, if this machine knows it or the server names it; otherwise None."""
    for known in (read_login(), local_server()):
        if known is not None and known.dashboard_url and known.server_url.rstrip("/") == server_url.rstrip("/"):
            return known.dashboard_url
    return named_dashboard(server_url)


def find_run(client: Client, word: str) -> wire.Run:
    """The run that `word` means: an id, the beginning of one run's id, or a name that one run has.

    Raises:
        CollageError: no run or several are meant; the message lists what comes near.
    """
    try:
        return client.run(word)
    except NotFound as error:
        if error.status == 410:
            raise
    found = client.runs(q=word, limit=_SEARCHED).runs
    meant = [run for run in found if run.name == word] or [run for run in found if run.run_id.startswith(word)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        listed = "".join(f"\n  {_described(run)}" for run in meant[:_NAMED])
        more = "\n  …" if len(meant) > _NAMED else ""
        raise CollageError(f"{printable(word)!r} may be one of {len(meant)} runs; name its id:{listed}{more}")
    others = [printable(run.name) for run in client.runs(limit=_SEARCHED).runs]
    hint = similar(printable(word), others) or "`collage-monitor list` names all"
    raise CollageError(f"no run has the id or the name {printable(word)!r}; {hint}")


def _described(run: wire.Run) -> str:
    return f"{run.run_id}  {printable(run.name)}, project {printable(run.project)}, {clock(run.created_at)}"
