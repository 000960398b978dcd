"""The root of `collage-monitor`: verbs come from every installed component through one entry-point group."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version

import click

from collage_monitor import __version__
from collage_monitor.errors import CollageError

__all__ = ["VERBS", "main", "require", "root"]

VERBS = "collage_monitor.commands"
_EXTRAS = {"query": "query", "archive": "archive", "collage_monitor": "client", "collage_demo": "all"}
"""The extra that brings what a verb or a package needs; other packages are called `collage_` and their extra."""
_REQUIREMENT = re.compile(r"""([\w.-]+)[^;]*;.*extra\s*==\s*['"]([\w-]+)['"]""")


def require(verb: str, *extras: str) -> None:
    """Check that what these extras bring is installed.

    Raises:
        click.ClickException: it is not; the message names the smallest extras that bring it.
    """
    absent = {extra: names for extra in extras if (names := _missing(extra))}
    if absent:
        missing = ", ".join(sorted(set().union(*absent.values())))
        raise click.ClickException(
            f"collage-monitor {verb} needs {missing}, not installed here; {_advice(*sorted(absent))}"
        )


def _missing(extra: str) -> set[str]:
    """Distributions that the extra names and that are not installed."""
    missing: set[str] = set()
    for text in requires("collage-monitor") or []:
        found = _REQUIREMENT.match(text)
        if found is None or found[2] != extra:
            continue
        try:
            version(found[1])
        except PackageNotFoundError:
            missing.add(found[1])
    return missing


def _advice(*extras: str) -> str:
    return f"pip install 'collage-monitor[{','.join(extras)}]'"


class VerbGroup(click.Group):
    """Commands found in the entry-point group, imported only when they are called or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_found()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _found().get(cmd_name)
        return _load(entry) if entry else super().get_command(ctx, cmd_name)


def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=VERBS)}


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        package = entry.value.partition(".")[0]
        extra = _EXTRAS.get(entry.name) or _EXTRAS.get(package, package.removeprefix("collage_"))
        return _absent(entry.name, error.name or str(error), extra)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.value} is not a click command")
    return command


def _absent(verb: str, module: str, extra: str) -> click.Command:
    text = f"needs {module}, which is not installed; {_advice(extra)}"

    @click.command(verb, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"collage-monitor {verb} {text}")

    return absent


@click.group(cls=VerbGroup, name="collage-monitor")
@click.version_option(__version__)
def root() -> None:
    """What low precision does to an optimizer's updates."""


def main() -> None:
    """Run the command; an error of ours is a sentence and status 1, never a traceback."""
    try:
        root()
    except CollageError as error:
        raise SystemExit(f"collage-monitor: {error}") from error
