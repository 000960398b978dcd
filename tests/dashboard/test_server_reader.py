"""The dashboard's way to the server: problems say what to do, and what a page will ask for is made ahead, for its
user alone."""

import pytest
from collage_dashboard.components import notice
from collage_dashboard.server_reader import Reader, explain
from flask import Flask

from collage_monitor.client import Client
from collage_monitor.errors import NotAuthorised, ServerUnreachable
from tests.dashboard.walk import attributes, text

PAGES = ["/", "/compare?run=run-plain", "/run/run-plain"]


def retries(page):
    return {"type": "retry", "index": 0} in attributes(page, "id")


@pytest.mark.parametrize("address", PAGES)
@pytest.mark.parametrize(
    ("refusal", "words", "again"),
    [
        (None, ("does not answer", "collage-monitor up"), True),
        ((401, "not_authorised"), ("refused the token", "--token-file"), False),
        ((503, "busy"), (), True),
    ],
)
def test_a_server_that_does_not_answer_or_refuses_says_what_to_do(server, shown, address, refusal, words, again):
    server.down, server.refuse_with = refusal is None, refusal
    page = shown(address)
    assert all(word in text(page) for word in words)
    assert retries(page) is again


@pytest.mark.parametrize(
    ("address", "words"),
    [("/run/nobody", "Nothing is stored under this address"), ("/a/b/c", "No such page")],
)
def test_an_address_that_leads_nowhere_says_so(shown, address, words):
    page = shown(address)
    assert words in text(page)
    assert not retries(page)


def test_a_problem_during_a_live_page_keeps_what_was_read():
    said = notice(explain(ServerUnreachable("no answer from http://127.0.0.1:1")))
    assert "was read before" in text(said)
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


@pytest.fixture
def asking():
    """Who asks, in a request."""
    with Flask(__name__).test_request_context():
        yield {"user": "ada"}


@pytest.fixture
def ahead(asking):
    """A reader that makes ahead what its user will ask for."""
    return Reader(lambda: Client("http://127.0.0.1:9", "token"), whose=lambda: asking["user"])


def test_what_is_made_ahead_is_made_once(ahead):
    numbers = iter(range(9))
    for _ in range(2):
        ahead.begin("a chart", lambda: f"drawn ahead, {next(numbers)}")
    assert ahead.begun_or_now("a chart", lambda: "drawn now") == "drawn ahead, 0"
    assert next(numbers) == 1
    assert ahead.begun_or_now("a chart", lambda: "drawn now") == "drawn now"
    assert ahead.begun_or_now("another chart", lambda: "drawn now") == "drawn now"


def test_another_user_never_gets_it(ahead, asking):
    ahead.begin("a chart", lambda: "ada's")
    asking["user"] = "eve"
    assert ahead.begun_or_now("a chart", lambda: "eve's") == "eve's"
    asking["user"] = "ada"
    assert ahead.begun_or_now("a chart", lambda: "made again") == "ada's"


def test_what_went_wrong_ahead_is_tried_again(ahead):
    def fails():
        raise ServerUnreachable("gone")

    ahead.begin("a chart", fails)
    assert ahead.begun_or_now("a chart", lambda: "drawn now") == "drawn now"
    ahead.begin("a chart", fails)
    with pytest.raises(ServerUnreachable):
        ahead.begun_or_now("a chart", fails)
