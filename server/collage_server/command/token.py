"""`collage-monitor token`: make, list and revoke tokens, through the API or on the host itself."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.progress import remark
from collage_monitor.command.terminal import printable
from collage_monitor.errors import ServerUnreachable
from collage_monitor.local import data_folder, find_token, read_token, server_address, write_private
from collage_server.app import make_store
from collage_server.auth import administration
from collage_server.auth.principals import digest_of
from collage_server.settings import settings_beside_server
from collage_server.store import AccessStore

__all__ = ["token"]

_Function = TypeVar("_Function", bound=Callable[..., None])


def _place_options(function: _Function) -> _Function:
    """Where the tokens are: behind a server, or in the database of this host."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON."),
        click.option(
            "--offline", is_flag=True, help="Ask no server: read and write the database in the data folder itself."
        ),
        click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder: database and token."),
        click.option(
            "--token",
            envvar="COLLAGE_TOKEN",
            help="Token of an administrator; default: the one in the data folder.",
        ),
        click.option(
            "--server-url", envvar="COLLAGE_SERVER_URL", default=server_address, show_default="the local server's"
        ),
    ):
        function = option(function)
    return function


class _Tokens:
    """Creates, lists and revokes tokens through the API."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, create: wire.TokenCreate) -> wire.TokenCreated:
        """Make a token."""
        return self._client.create_token(create)

    def all(self) -> wire.TokenList:
        """Every token that the server knows."""
        return self._client.tokens()

    def revoke(self, token_id: str) -> wire.Token:
        """Revoke a token."""
        return self._client.revoke_token(token_id)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user may have a number only.
        return str(os.getuid())


class _HostTokens:
    """Creates, lists and revokes tokens in the database: anyone who may write its file may do this."""

    def __init__(self, store: AccessStore) -> None:
        self._store = store
        self._actor = f"host:{_user()}"[:64]

    def create(self, create: wire.TokenCreate) -> wire.TokenCreated:
        """Make a token."""
        return administration.create_token(self._store, create, time.time(), self._actor)

    def all(self) -> wire.TokenList:
        """Every token that the server knows."""
        return wire.TokenList(tokens=self._store.tokens())

    def counts(self, file: Path, role: str) -> bool:
        """Whether the file holds the secret of a token of this role that is not revoked."""
        try:
            secret = file.read_text(encoding="ascii").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return False
        known = self._store.unrevoked_tokens().get(digest_of(secret))
        return known is not None and known.role == role

    def revoke(self, token_id: str) -> wire.Token:
        """Revoke a token; running servers notice within five seconds."""
        return administration.revoke_token(self._store, token_id, time.time(), self._actor)


@contextmanager
def _tokens(
    server_url: str, token: str | None, folder: Path | None, offline: bool
) -> Iterator[_Tokens | _HostTokens]:
    if not offline:
        where = data_folder(folder)
        try:
            known = token or (find_token(server_url) if folder is None else read_token(folder))
            with Client(server_url, known) as client:
                yield _Tokens(client)
        except ServerUnreachable as error:
            raise click.ClickException(
                f"{error}; --offline writes into the database of {where} without it"
            ) from error
        return
    store = make_store(settings_beside_server(folder))
    store.open()
    try:
        yield _HostTokens(store.access)
    finally:
        store.close()


@click.group("token")
def token() -> None:
    """Make, list and revoke tokens."""


@token.command("create")
@_place_options
@click.option("--name", required=True, help="What the token is for; shown in the list.")
@click.option("--role", type=click.Choice(wire.ROLES), required=True)
@click.option("--project", "projects", multiple=True, help="Project that the token is for; may be repeated.")
@click.option("--all-projects", is_flag=True, help="Make the token valid for every project, now and later.")
@click.option(
    "--output",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --offline: write the secret to this file (mode 0600). If it holds a valid token of the same role, "
    "that one is kept.",
)
def create_token(
    name: str,
    role: str,
    projects: tuple[str, ...],
    all_projects: bool,
    file: Path | None,
    as_json: bool,
    **place: Any,
) -> None:
    """Make a token and print its secret, once."""
    if file is not None and not place["offline"]:
        raise click.UsageError(
            "--output looks into the database itself whether its token counts; give --offline, too"
        )
    if bool(projects) == (all_projects or role == "admin"):
        raise click.UsageError("give --project NAME, once or more, or --all-projects (an admin token is for all)")
    create = wire.TokenCreate(name=name, role=cast(wire.Role, role), projects=list(projects) or None)
    with _tokens(**place) as tokens:
        if file is not None and isinstance(tokens, _HostTokens) and tokens.counts(file, role):
            remark(f"{file} holds a token of role {role} that counts; it stays")
            return
        created = tokens.create(create)
    if file is not None:
        write_private(file, created.secret + "\n")
        remark(f"{_line(created.token)}\n{file} holds it")
        return
    if as_json:
        click.echo(wire.encode_json(created))
        return
    click.echo(created.secret)
    remark(f"{_line(created.token)}\nThe token is the first line, shown only now; set it as COLLAGE_TOKEN.")


@token.command("list")
@_place_options
def list_tokens(as_json: bool, **place: Any) -> None:
    """List tokens, newest first."""
    with _tokens(**place) as tokens:
        found = tokens.all()
    if as_json:
        click.echo(wire.encode_json(found))
        return
    if not found.tokens:
        click.echo("no tokens yet beside the server's own; `collage-monitor token create` makes one")
    for entry in found.tokens:
        click.echo(_line(entry))


@token.command("revoke")
@_place_options
@click.argument("token_id")
def revoke_token(token_id: str, as_json: bool, **place: Any) -> None:
    """Revoke a token for good; within five seconds no server takes it."""
    with _tokens(**place) as tokens:
        revoked = tokens.revoke(token_id)
    click.echo(wire.encode_json(revoked) if as_json else _line(revoked))


def _line(entry: wire.Token) -> str:
    also = "".join(f"; {grant.role}: {_projects(grant.projects)}" for grant in entry.also)
    projects = _projects(entry.projects) + also
    state = f"revoked {_moment(entry.revoked_at)}" if entry.revoked_at else f"used {_moment(entry.last_used_at)}"
    if entry.expires_at is not None:
        state = f"session until {_moment(entry.expires_at)}, {state}"
    about = printable(f"{entry.name}  ({projects})")
    return f"{entry.token_id}  {entry.role:<8}{about}  made {_moment(entry.created_at)}, {state}"


def _projects(names: list[str] | None) -> str:
    return "all projects" if names is None else ", ".join(names)


def _moment(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
