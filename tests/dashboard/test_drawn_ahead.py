"""What a page will ask for is made while the browser loads it: for the same user, once, and never in its place."""

import pytest
from collage_dashboard.server_reader import Reader
from flask import Flask

from collage_monitor.errors import ServerUnreachable


@pytest.fixture
def asking():
    return {"user": "ada"}


@pytest.fixture
def reader(asking):
    return Reader(lambda: None, whose=lambda: asking["user"])


@pytest.fixture(autouse=True)
def request_context():
    with Flask(__name__).test_request_context():
        yield


def test_it_is_made_once(reader):
    made = []
    for _ in range(2):
        reader.begin("a chart", lambda: made.append("ahead") or "drawn ahead")
    assert reader.begun_or_now("a chart", lambda: "drawn now") == "drawn ahead"
    assert made == ["ahead"]
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
