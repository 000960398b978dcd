"""What a page will ask for is made while the browser loads it: for the same user, once, and never in its place."""

import pytest
from collage_dashboard.server_reader import Reader
from flask import Flask

from collage_monitor.client import Client
from collage_monitor.errors import ServerUnreachable


@pytest.fixture
def asking():
    return {"user": "ada"}


@pytest.fixture
def reader(asking):
    return Reader(lambda: Client("http://127.0.0.1:9", "token"), whose=lambda: asking["user"])


@pytest.fixture(autouse=True)
def request_context():
    with Flask(__name__).test_request_context():
        yield


def test_it_is_made_once(reader):
    numbers = iter(range(9))
    for _ in range(2):
        reader.begin("a chart", lambda: f"drawn ahead, {next(numbers)}")
    assert reader.begun_or_now("a chart", lambda: "drawn now") == "drawn ahead, 0"
    assert next(numbers) == 1
    assert reader.begun_or_now("a chart", lambda: "drawn now") == "drawn now"
    assert reader.begun_or_now("another chart", lambda: "drawn now") == "drawn now"


def test_another_user_never_gets_it(reader, asking):
    reader.begin("a chart", lambda: "ada's")
    asking["user"] = "eve"
    assert reader.begun_or_now("a chart", lambda: "eve's") == "eve's"
    asking["user"] = "ada"
    assert reader.begun_or_now("a chart", lambda: "made again") == "ada's"


def test_what_went_wrong_ahead_is_tried_again(reader):
    def fails():
        raise ServerUnreachable("gone")

    reader.begin("a chart", fails)
    assert reader.begun_or_now("a chart", lambda: "drawn now") == "drawn now"
    reader.begin("a chart", fails)
    with pytest.raises(ServerUnreachable):
        reader.begun_or_now("a chart", fails)
