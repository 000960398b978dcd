"""Empty and error states: each says what happened and what to do."""

import pytest
from collage_dashboard.app import render
from collage_dashboard.components import notice
from collage_dashboard.server_reader import Reader, explain
from collage_dashboard.view import read_address

from collage_monitor.client import Client
from collage_monitor.errors import NotAuthorised, ServerUnreachable
from tests.dashboard.walk import components, text

PAGES = [("/", ""), ("/compare", "?run=run-plain"), ("/run/run-plain", "")]


def retries(page):
    return any(getattr(part, "id", None) == {"type": "retry", "index": 0} for part in components(page))


@pytest.mark.parametrize("address", PAGES)
def test_no_answer_says_how_to_start_the_server_and_tries_again(server, reader, address):
    server.down = True
    page = render(read_address(*address), reader)
    assert "does not answer" in text(page)
    assert "collage-monitor up" in text(page)
    assert retries(page)


@pytest.mark.parametrize("address", PAGES)
def test_a_refused_token_says_where_the_token_comes_from(server, reader, address):
    server.refuse_with = (401, "not_authorised")
    page = render(read_address(*address), reader)
    assert "refused the token" in text(page)
    assert "--token-file" in text(page)


def test_a_busy_server_is_asked_again(server, reader):
    server.refuse_with = (503, "busy")
    assert retries(render(read_address("/", ""), reader))


def test_a_run_that_is_not_there(reader):
    page = render(read_address("/run/nobody", ""), reader)
    assert "Nothing is stored under this address" in text(page)
    assert not retries(page)


def test_an_address_that_leads_nowhere(reader):
    assert "No such page" in text(render(read_address("/a/b/c", ""), reader))


def test_a_problem_during_a_live_page_keeps_what_was_read():
    shown = notice(explain(ServerUnreachable("no answer from http://127.0.0.1:1")))
    assert "was read before" in text(shown)
    assert notice(None) is None


def test_a_changed_token_is_taken_up_after_a_refusal():
    tokens = iter(["old", "new"])
    made = []

    def factory():
        made.append(next(tokens))
        return Client("http://127.0.0.1:1", made[-1])

    reader = Reader(factory)

    def refuse(client):
        raise NotAuthorised("no", status=401)

    with pytest.raises(NotAuthorised):
        reader.ask(refuse)
    reader.ask(lambda client: client)
    reader.ask(lambda client: client)
    assert made == ["old", "new"]
