"""The root of `collage-monitor`: verbs come from every installed component through one entry-point group."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from collage_monitor import __version__
from collage_monitor.errors import CollageError
from collage_monitor.spelling import similar

__all__ = ["VERBS", "main", "require", "root"]

VERBS = "collage_monitor.commands"
_OF_SERVER = frozenset(
    {"archive", "backup", "dashboard", "migrate", "report", "restore", "serve", "setup", "token"}
)
"""The verbs that collage-monitor-server registers; without it they are listed all the same."""
_EXTRAS = {
    **dict.fromkeys(_OF_SERVER, ("server",)),
    "archive": ("archive",),
    "demo": ("agent", "server"),
    "mcp": ("mcp",),
    "preflight": ("agent", "server"),
    "query": ("query",),
    "run": ("agent",),
    "sync": ("client",),
    "up": ("server",),
}
"""The extras that bring what a verb needs, where they are not its package's own."""
_PACKAGES = {"collage_monitor": "client", "collage_agent": "agent"}
"""The extra of each package that has verbs."""
_DISTRIBUTIONS = {"server": "collage-monitor-server", "archive": "'collage-monitor-server[archive]'"}
"""What is installed for an extra under a name of its own."""
_LIST = {
    "Train": {
        "run": "start a program, and watch every torch optimizer in it",
        "preflight": "train a program for some steps, and judge it",
        "doctor": "say what the agent sees on this machine",
        "audit": "say what the run behind a checkpoint really keeps",
        "convert": "say what a checkpoint gains in another strategy",
        "cure": "convert a checkpoint, and train on from it",
        "sync": "send the reports that runs have left on disk",
        "demo": "train a small model under five strategies, watched",
    },
    "Look": {
        "list": "runs, newest first, with the judgement of each",
        "show": "what is wrong with a run, and its numbers",
        "compare": "runs beside each other: who does better, and why",
        "open": "the dashboard in the browser",
        "report": "one HTML file about a run, or about several",
        "check": "judge a run; status 1 if a condition fails",
        "alerts": "when alerts fired and ended",
        "query": "SQL over all archived runs",
        "export": "all data of a run into a file",
        "import": "a finished run from a file",
        "note": "write a line into a run's timeline",
        "tag": "add tags to a run, or remove some",
        "delete": "delete runs for good; asks first",
        "mcp": "answer an assistant's questions about runs",
    },
    "Operate": {
        "up": "start server and dashboard on this machine",
        "serve": "the server alone",
        "dashboard": "the dashboard alone",
        "setup": "settings, services and a site for a team's server",
        "login": "store a server's address and a token",
        "status": "say whether the server is well",
        "token": "make, list and revoke tokens",
        "migrate": "bring a database's schema up to date",
        "backup": "copy the database while the server runs",
        "restore": "put a back-up in place while it is stopped",
        "archive": "older points of runs, in files",
    },
}
"""Verbs in the order in which `-h` lists them, with what they do; no verb is imported for it."""
_OLD_NAMES = {"replay": "sync"}
"""Old names still work, say what they are called now, and are not listed."""
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([\w,-]+)\])?[^;]*;.*extra\s*==\s*['"]([\w-]+)['"]""")


def require(verb: str, *extras: str) -> None:
    """Raise unless the packages of these extras are installed.

    Raises:
        click.ClickException: it is not; the message names what is missing, and the extras that bring it.
    """
    if (text := _lacking(extras)) is not None:
        raise click.ClickException(f"{verb} {text}")


def _lacking(extras: Iterable[str]) -> str | None:
    """The missing packages of these extras and how to install them; None if nothing is missing."""
    absent = {extra: names for extra in extras if (names := _missing(extra))}
    if not absent:
        return None
    missing = ", ".join(sorted(set().union(*absent.values())))
    return f"needs {missing}, not installed here; {_advice(*sorted(absent))}"


def _missing(extra: str, distribution: str = "collage-monitor") -> set[str]:
    """Distributions that the extra names, itself or by another extra, and that are not installed."""
    missing: set[str] = set()
    for text in requires(distribution) or []:
        found = _REQUIREMENT.match(text)
        if found is None or found[3] != extra:
            continue
        try:
            version(found[1])
        except PackageNotFoundError:
            missing.add(found[1])
            continue
        if found[2] and found[1].startswith("collage-monitor"):
            missing.update(*(_missing(inner, found[1]) for inner in found[2].split(",")))
    return missing


def _advice(*extras: str) -> str:
    """The line that installs them: extras of collage-monitor, then the server."""
    ours = ",".join(extra for extra in extras if extra not in _DISTRIBUTIONS)
    others = [_DISTRIBUTIONS[extra] for extra in extras if extra in _DISTRIBUTIONS]
    return " ".join(["pip install", *([f"'collage-monitor[{ours}]'"] if ours else []), *others])


class VerbGroup(click.Group):
    """Commands found in the entry-point group, imported only when they are called or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_found(), *_OF_SERVER})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _OLD_NAMES.get(cmd_name, cmd_name)
        entry = _found().get(name)
        if entry is None and name not in _OF_SERVER:
            return super().get_command(ctx, cmd_name)
        lacking = _lacks(name, entry)
        command = _load(entry) if entry and not lacking else _absent(name, lacking)
        if name != cmd_name:
            command = copy(command)
            command.name = cmd_name
            command.deprecated = f"It is called `{name}` now."
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by what they are for; those of other packages last, in their own words."""
        found = _found()
        rows = {
            title: [
                (verb, _needs(verb, found.get(verb)) or said)
                for verb, said in verbs.items()
                if verb in found or verb in _OF_SERVER
            ]
            for title, verbs in _LIST.items()
        }
        known = set().union(*_LIST.values())
        others = [(verb, self.get_command(ctx, verb)) for verb in self.list_commands(ctx) if verb not in known]
        rows["Of other packages"] = [(verb, own.get_short_help_str(60)) for verb, own in others if own is not None]
        for title, listed in rows.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown verb is answered with similar ones."""
        word = args[0]
        if not word.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            hint = similar(word, self.list_commands(ctx)) or "`collage-monitor -h` lists all"
            ctx.fail(f"no verb is called {word!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # The overloads tell apart what this one signature takes.
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run a verb. Every error is a sentence behind one prefix, whichever layer found it, never a traceback."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            status = super().main(args, standalone_mode=False, **extra)
        except NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _say_usage(error)
            click.echo(f"collage-monitor: {error.format_message()}", err=True)
            sys.exit(error.exit_code)
        except CollageError as error:
            click.echo(f"collage-monitor: {error}", err=True)
            sys.exit(1)
        except click.Abort:
            click.echo("collage-monitor: stopped", err=True)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _say_usage(error: click.ClickException) -> None:
    """Shows the verb's usage before an error in the arguments."""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\n`{error.ctx.command_path} -h` explains it.", err=True)


def _extras_of(verb: str, entry: EntryPoint | None) -> tuple[str, ...]:
    if verb in _EXTRAS or entry is None:
        return _EXTRAS[verb]
    package = entry.value.partition(".")[0]
    return (_PACKAGES[package],) if package in _PACKAGES else ()


def _lacks(verb: str, entry: EntryPoint | None) -> str:
    """What a verb lacks and how to install it; "" if nothing is missing."""
    extras = _extras_of(verb, entry)
    unregistered = "" if entry else f"needs collage-monitor-server, not installed here; {_advice(*extras)}"
    return _lacking(extras) or unregistered


def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=VERBS)}


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        extras = _extras_of(entry.name, entry) or (entry.value.partition(".")[0].removeprefix("collage_"),)
        text = f"needs {error.name or error}, which is not installed; {_advice(*extras)}"
        return _absent(entry.name, text)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.value} is not a click command")
    return command


def _needs(verb: str, entry: EntryPoint | None) -> str:
    """How to install what a verb lacks; "" if nothing is missing."""
    lacking = _lacks(verb, entry)
    return f"needs {lacking.rpartition('; ')[2]}" if lacking else ""


def _absent(verb: str, text: str) -> click.Command:
    """Stands for a verb that lacks something: help and error say what, and how to install it."""

    @click.command(verb, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"{verb} {text}")

    return absent


@click.group(cls=VerbGroup, name="collage-monitor", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def root() -> None:
    """What low precision does to an optimizer's updates."""


def main() -> None:
    """Run the command."""
    root()
