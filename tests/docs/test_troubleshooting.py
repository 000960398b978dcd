"""docs/troubleshooting.md has every message of the code, and a search for it finds the cause."""

import logging
import re

import httpx
import pytest
import torch
from collage_agent.run_settings import read_settings
from collage_optim import CollageAdamW
from collage_optim.range_guards import log_once
from collage_server.errors import unknown_run

from collage_monitor.command import root
from collage_monitor.errors import CollageError
from collage_monitor.importing.curve_files import read_curves
from collage_monitor.refusals import refusal
from tests.agent.test_wrong_calls import CALLS
from tools import troubleshooting_page as tool
from tools.troubleshooting_page import PAGE, causes, messages, page

CAUSES = causes()


def headings(said):
    """The headings of the page under which this message stands."""
    told = [
        (cause.title, ".*".join(map(re.escape, text.split("…")))) for cause in CAUSES for text in cause.messages
    ]
    return {title for title, pattern in told if re.search(pattern, said, re.DOTALL)}


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == page(), "python -m tools.troubleshooting_page writes it again"
    assert len({cause.title for cause in CAUSES}) == len(CAUSES) > 30
    assert sum(len(cause.messages) for cause in CAUSES) > 500
    assert all(cause.messages for cause in CAUSES)
    assert all(text.endswith(".") for cause in CAUSES for text in (cause.why, cause.next))


def test_a_message_without_a_cause_and_a_cause_without_a_message_are_refused(monkeypatch):
    found = messages()
    new = tool.Message("collage_monitor/new.py", "begin", "nothing is there; make it first")
    monkeypatch.setattr(tool, "messages", lambda: (*found, new))
    with pytest.raises(ValueError, match=r"collage_monitor/new\.py:begin: 'nothing is there; make it first'"):
        causes()
    monkeypatch.setattr(tool, "messages", lambda: tuple(one for one in found if "importing" not in one.path))
    with pytest.raises(ValueError, match="no message comes from collage_monitor/importing; remove"):
        causes()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_who_searches_for_the_answer_to_a_wrong_call_finds_it(name):
    with pytest.raises((TypeError, ValueError, CollageError)) as caught:
        CALLS[name][0]()
    assert headings(str(caught.value)), caught.value


def test_a_warning_in_the_log_is_found(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "collage_agent"):
        read_settings({"COLLAGE_PROJCT": "x", "COLLAGE_DIR": str(tmp_path)})
    assert headings(caplog.text) == {"`init`, `log` or a variable is refused"}


def test_a_warning_of_low_precision_is_found(caplog):
    log_once.cache_clear()
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    CollageAdamW([weight], strategy="plain").step()
    assert "is more than 'plain' can hold" in caplog.text
    (cause,) = [cause for cause in CAUSES if any("more than … can hold" in text for text in cause.messages)]
    assert cause.title in headings(caplog.text)


@pytest.mark.parametrize(
    ("status", "heading"),
    [
        (401, "A token is missing, unknown or not allowed to do this"),
        (404, "A run's id is taken, or the run is gone"),
    ],
)
def test_a_servers_answer_is_found(status, heading):
    body = {"error": {"code": "x", "message": unknown_run("r7").message}}
    said = refusal(httpx.Response(status, json=body, request=httpx.Request("GET", "http://monitor.example/api")))
    assert heading in headings(str(said))


def test_the_answer_to_a_file_is_found(tmp_path):
    (tmp_path / "curve.csv").write_text("step,loss\n1,x\n")
    with pytest.raises(CollageError) as caught:
        list(read_curves(tmp_path / "curve.csv").reports)
    assert headings(str(caught.value)) == {"A file cannot be imported"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "heading"),
    [
        (["check", "r", "--dir", "."], "The command's options do not fit together"),
        (["check", "r", "--fail-if", "soon"], "A condition on runs is not understood"),
        (["setup", "database", "--database", "sqlite:///x"], "The database cannot be opened or changed"),
    ],
)
def test_the_answer_to_a_wrong_command_is_found(words, heading, capsys):
    with pytest.raises(SystemExit):
        root.main(words)
    assert heading in headings(" ".join(capsys.readouterr().err.split()))
