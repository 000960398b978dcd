"""docs/command.md lists every verb and option as the command explains them, and no page names another."""

import dataclasses
import re
import shlex

import click
import pytest
from click.testing import CliRunner
from collage_server.settings import Settings

from collage_monitor.command import root
from tests.docs.blocks import DOCS
from tools.command_page import MARKER, PAGE, reference
from tools.packages import CALLS, STARTED

HEAD, _, TAIL = PAGE.read_text().partition(MARKER)


@pytest.mark.slow
def test_the_reference_is_what_the_command_says_which_still_takes_h_once_it_is_written_down():
    assert TAIL.rstrip() == reference().rstrip(), "python -m tools.command_page writes it anew"
    reference()
    assert CliRunner().invoke(root, ["-h"]).exit_code == 0


def test_the_verbs_of_the_head_exist_and_make_packages_calls_every_one():
    named = set(re.findall(r"`collage-monitor ([a-z]+)", HEAD))
    assert len(named) > 8
    assert named <= set(root.list_commands(click.Context(root)))
    called = {verb.partition(" ")[0] for verb in (*CALLS, *STARTED)}
    assert set(root.list_commands(click.Context(root))) == called


TEXTS = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
TEXTS += [
    f"../{page}" for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "agent/README.md", "server/README.md")
]


def shell_lines(page):
    """The lines of a page's blocks in `sh` or no language, a continued one as one; and what it quotes in a line."""
    parts = re.split(r"^ *```(\w*)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    blocks = [text for language, text in zip(parts[1::4], parts[2::4], strict=True) if language in {"", "sh"}]
    quoted = [line for text in parts[::4] for line in re.findall(r"`(collage-monitor [^`]+)`", text)]
    return [*quoted, *(line for block in blocks for line in block.replace("\\\n", " ").splitlines())]


def calls(page):
    """What stands behind `collage-monitor`, up to the program that it starts or the end of the command."""
    for line in shell_lines(page):
        for called in re.findall(r"(?:^|[\s(])collage-monitor ([^|;&>)]*)", line.partition(" #")[0]):
            yield shlex.split(called.partition(" -- ")[0].replace("'", "").replace('"', ""))


def unknown(words):
    """What the command does not have of these words; None if it has all."""
    command: click.Command = root
    rest = list(words)
    while isinstance(command, click.Group):
        if not rest or rest[0].startswith("-") or rest[0].isupper():
            return None
        name = rest.pop(0)
        found = command.get_command(click.Context(root), name)
        if found is None:
            return name
        command = found
    known = {option for entry in command.params for option in (*entry.opts, *entry.secondary_opts)}
    known |= {"-h", "--help"}
    given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return next((option for option in given if option not in known), None)


@pytest.mark.slow
@pytest.mark.parametrize("page", TEXTS)
def test_every_verb_and_option_exists(page):
    for words in calls(page):
        assert unknown(words) is None, f"collage-monitor {' '.join(words)}"


def test_a_verb_and_an_option_that_do_not_exist_are_seen():
    assert unknown(["vanish"]) == "vanish"
    assert unknown(["list", "--vanish", "1"]) == "--vanish"
    assert unknown(["list", "--json"]) is None
    assert sum(len(list(calls(page))) for page in TEXTS) > 80


def test_every_variable_of_the_server_is_a_setting():
    known = {entry.name for entry in dataclasses.fields(Settings)}
    for page in TEXTS:
        named = set(re.findall(r"COLLAGE_SERVER_([A-Z_]+[A-Z])\b", (DOCS / page).read_text())) - {"URL", "NAME"}
        assert {name.lower() for name in named} <= known, page
