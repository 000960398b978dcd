"""The reference part of docs/command.md: every verb with its arguments and options, from the command itself.

`python -m tools.command_page` writes it below the marker; a test compares the page with its output.
"""

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from collage_monitor.command import root

PAGE = Path(__file__).parents[1] / "docs" / "command.md"
MARKER = "<!-- From here on: python -m tools.command_page -->\n"


def reference() -> str:
    """A section a verb, in the order of the alphabet; a group's verbs in sections below its own."""
    context = click.Context(root, info_name="collage-monitor", **root.context_settings)
    return "\n".join(_commands(root, context, 2))


def _commands(group: click.Group, context: click.Context, depth: int) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield from _section(command, inner, depth)
        if isinstance(command, click.Group):
            yield from _commands(command, inner, depth + 1)


def _section(command: click.Command, context: click.Context, depth: int) -> Iterator[str]:
    yield f"\n{'#' * depth} `{context.command_path.removeprefix('collage-monitor ')}`\n"
    yield f"    {command.get_usage(context).removeprefix('Usage: ').replace(chr(10), chr(10) + '    ')}\n"
    yield cleandoc(command.help or "") + "\n"
    records = [record for entry in command.params if (record := entry.get_help_record(context)) is not None]
    if records:
        yield "| option | |\n|---|---|"
        for option, text in records:
            yield f"| `{option.replace('|', ' or ')}` | {text.replace('|', ' or ')} |"


def main() -> None:
    """Write the page again."""
    head = PAGE.read_text().partition(MARKER)[0]
    PAGE.write_text(head + MARKER + reference() + "\n")


if __name__ == "__main__":
    main()
