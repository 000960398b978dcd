"""docs/command.md lists every verb and option as the command itself explains them."""

import re

import click
from click.testing import CliRunner

from collage_monitor.command import root
from tools.command_page import MARKER, PAGE, reference
from tools.packages import CALLS, STARTED

HEAD, _, TAIL = PAGE.read_text().partition(MARKER)


def test_the_reference_is_what_the_command_says():
    assert TAIL.rstrip() == reference().rstrip(), "python -m tools.command_page writes it anew"


def test_the_command_still_takes_h_once_it_is_written_down():
    """A command keeps the help option of the first context that asks for it."""
    reference()
    assert CliRunner().invoke(root, ["-h"]).exit_code == 0


def test_the_verbs_of_the_head_exist():
    named = set(re.findall(r"`collage-monitor ([a-z]+)", HEAD))
    assert len(named) > 8
    assert named <= set(root.list_commands(click.Context(root)))


def test_make_packages_calls_every_verb():
    called = {verb.partition(" ")[0] for verb in (*CALLS, *STARTED)}
    assert set(root.list_commands(click.Context(root))) == called
