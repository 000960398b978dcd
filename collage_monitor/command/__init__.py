"""The root of `collage-monitor`: verbs come from every installed component through one entry-point group."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from itertools import zip_longest
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from collage_monitor import __version__
from collage_monitor.errors import CollageError
from collage_monitor.spelling import similar

__all__ = ["VERBS", "VerbGroup", "main", "require", "root"]

VERBS = "collage_monitor.commands"
_OF_SERVER = (
    "archive",
    "backup",
    "report",
    "serve",
    "serve.dashboard",
    "setup",
    "setup.database",
    "token",
)
"""What collage-monitor-server registers; without it these are listed all the same."""
_EXTRAS = {
    "archive": ("archive",),
    "archive.query": ("query",),
    "demo": ("agent", "server"),
    "run": ("agent",),
    "serve.mcp": ("mcp",),
    "sync": ("client",),
    "up": ("server",),
}
"""The extras that bring what a verb needs, where they are not its package's own."""
_PACKAGES = {
    "collage_monitor": "client",
    "collage_agent": "agent",
    "collage_server": "server",
    "collage_dashboard": "server",
}
"""The extra of each package that has verbs."""
_DISTRIBUTIONS = {"server": "collage-monitor-server", "archive": "'collage-monitor-server[archive]'"}
"""What is installed for an extra under a name of its own."""
_LIST = {
    "Train": {
        "run": "watch a program's optimizers",
        "check": "judge a run, or a program",
        "doctor": "what the agent sees here",
        "audit": "what a checkpoint really has",
        "convert": "a checkpoint's storage",
        "cure": "mend a checkpoint, train on",
        "sync": "send reports left on disk",
        "demo": "five strategies, watched",
    },
    "Look": {
        "list": "runs, problems first",
        "show": "what is wrong with a run",
        "compare": "runs side by side",
        "open": "the dashboard in the browser",
        "report": "one HTML file about runs",
        "alerts": "when alerts fired and ended",
        "export": "a run's data into a file",
        "import": "a finished run from a file",
        "edit": "a run's tags and notes",
        "delete": "runs for good; asks first",
    },
    "Operate": {
        "up": "server and dashboard, here",
        "serve": "server, dashboard or MCP",
        "login": "keep an address and a token",
        "token": "make, list and revoke tokens",
        "status": "is the server well?",
        "setup": "a team's server; a schema",
        "backup": "make, verify and restore one",
        "archive": "older points in files; SQL",
    },
}
"""Verbs in the order in which `-h` lists them, with what they do; no verb is imported for it."""
_WIDTH = 80
"""The columns of a terminal in which two verbs stand side by side in `-h`."""
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
    """Verbs of its own, and those that packages add by entry points: `archive.query` is `query` of `archive`.

    An entry point is imported only when its verb is called or described.
    """

    def _entries(self) -> dict[str, EntryPoint]:
        """The entry points below this group, by their names in it; `serve.mcp` is there without a `serve`, too."""
        prefix = f"{self.name}."
        return {name.removeprefix(prefix): entry for name, entry in _found().items() if name.startswith(prefix)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(name.partition(".")[0] for name in self._entries())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (entry := self._entries().get(cmd_name)) is not None:
            lacking = _lacking(_extras_of(entry))
            return _absent(entry.name, lacking) if lacking else _load(entry)
        has_verbs = any(name.startswith(f"{cmd_name}.") for name in self._entries())
        return VerbGroup(cmd_name) if has_verbs else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown verb is answered with similar ones."""
        word = args[0]
        if ".".join(args[:2]) in self._entries() and len(args) > 1:
            return word, VerbGroup(word), args[1:]  # `serve mcp` imports nothing of `serve`, and does without it.
        if not word.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            hint = similar(word, self.list_commands(ctx)) or f"`{ctx.command_path} -h` lists all"
            ctx.fail(f"no verb is called {word!r}; {hint}")
        return super().resolve_command(ctx, args)


class Root(VerbGroup):
    """The command itself: its help is one screen, its errors are sentences."""

    def _entries(self) -> dict[str, EntryPoint]:
        return _found()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs by what they are for; those of other packages last, in their own words.

        In a narrow terminal one stands below the other. The options -h, --version and -q are in the usage.
        """
        found = self._entries()
        for title, verbs in _LIST.items():
            if rows := [(_marked(verb, found[verb]), text) for verb, text in verbs.items() if verb in found]:
                with formatter.section(title):
                    self._format_verbs(formatter, rows)
        known = set().union(*_LIST.values())
        others = [(verb, self.get_command(ctx, verb)) for verb in self.list_commands(ctx) if verb not in known]
        if others:
            with formatter.section("Of other packages"):
                formatter.write_dl([(verb, own.get_short_help_str(60)) for verb, own in others if own is not None])
        needs: dict[str, list[str]] = {}
        for entry in found.values():
            if text := _needs(entry):
                needs.setdefault(text, []).append(entry.name.replace(".", " "))
        if needs:
            with formatter.section("Verbs with * need packages"):
                for text, names in needs.items():
                    formatter.write(f"  {text}  ({', '.join(names)})\n")

    def _format_verbs(self, formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
        if formatter.width < _WIDTH - 2:  # click leaves two columns free.
            formatter.write_dl(rows)
            return
        cells = [f"{verb:<9}{text:<30}" for verb, text in rows]
        half = (len(cells) + 1) // 2
        for left, right in zip_longest(cells[:half], cells[half:], fillvalue=""):
            formatter.write(f"  {left}{right}".rstrip() + "\n")

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


def _extras_of(entry: EntryPoint) -> tuple[str, ...]:
    if entry.name in _EXTRAS:
        return _EXTRAS[entry.name]
    package = entry.value.partition(".")[0]
    return (_PACKAGES[package],) if package in _PACKAGES else ()


def _found() -> dict[str, EntryPoint]:
    absent = {name: EntryPoint(name, "collage_server.command", VERBS) for name in _OF_SERVER}
    return absent | {entry.name: entry for entry in entry_points(group=VERBS)}


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        extras = _extras_of(entry) or (entry.value.partition(".")[0].removeprefix("collage_"),)
        text = f"needs {error.name or error}, which is not installed; {_advice(*extras)}"
        return _absent(entry.name, text)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.value} is not a click command")
    return command


def _needs(entry: EntryPoint) -> str:
    """How to install what a verb lacks; "" if nothing is missing."""
    lacking = _lacking(_extras_of(entry))
    return lacking.rpartition("; ")[2] if lacking else ""


def _marked(verb: str, entry: EntryPoint) -> str:
    return f"{verb} *" if _needs(entry) else verb


def _absent(name: str, text: str) -> click.Command:
    """Stands for a verb that lacks something: help and error say what, and how to install it."""
    verb = name.replace(".", " ")

    @click.command(verb, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"{verb} {text}")

    return absent


@click.group(
    cls=Root,
    name="collage-monitor",
    options_metavar="[-h] [--version] [-q]",
    subcommand_metavar="VERB ...",
    epilog="`collage-monitor VERB -h` explains a verb; -q (--quiet) leaves out progress.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__)
@click.option("-q", "--quiet", is_flag=True, help="Print no progress and no remarks.")
def root(quiet: bool) -> None:
    """What low precision does to an optimizer's updates."""


def main() -> None:
    """Run the command."""
    root()
