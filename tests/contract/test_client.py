"""The read client against a transport that answers from memory: routes, queries, and the meaning of refusals."""

from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from collage_monitor.client import Client
from collage_monitor.errors import (
    CollageError,
    NotAuthorised,
    NotFound,
    ServerRefusal,
    ServerUnreachable,
    Unavailable,
)

RUN: dict[str, Any] = {
    "run_id": "r",
    "project": "p",
    "name": "n",
    "group": None,
    "tags": [],
    "notes": "",
    "seed": None,
    "config": {},
    "state": "running",
    "created_at": 1,
    "updated_at": 2.0,
    "first_step": 1,
    "last_step": 10,
    "attempts": [],
    "watch": None,
    "latest": {"edq_ratio": 0.5, "edq_cosine": None, "edq": "Infinity"},
    "scalars": {"loss": {"step": 3, "value": "NaN"}},
}


def client_of(answer, token="secret"):
    seen = []

    def handle(request):
        seen.append(request)
        return answer(request) if callable(answer) else answer

    return Client("http://server/", token, transport=httpx.MockTransport(handle)), seen


@pytest.mark.parametrize("token", ["secret", "secret\r\n"])
def test_a_run_with_undefined_and_infinite_numbers(token):
    """White space around a token is left out."""
    client, seen = client_of(httpx.Response(200, json=RUN), token)
    run = client.run("r")
    assert run.latest == {"edq_ratio": 0.5, "edq_cosine": None, "edq": "Infinity"}
    assert run.scalars["loss"].value == "NaN"
    assert seen[0].url.path == "/api/v1/runs/r"
    assert seen[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["se\ncret", "two words", "sécret", "sec\0ret"])
def test_a_token_that_cannot_be_sent_is_not_shown(token):
    with pytest.raises(CollageError, match="printable ASCII") as raised:
        Client("http://server", token)
    assert token not in str(raised.value)
    assert repr(token)[1:-1] not in str(raised.value)


def test_ids_are_parts_of_the_path_whatever_they_hold():
    client, seen = client_of(httpx.Response(200, json=RUN))
    for run_id in ("a?b", "a/../b", "a\nb", "ü"):
        client.run(run_id)
        assert unquote(seen[-1].url.raw_path.decode()) == f"/api/v1/runs/{run_id}"


def test_queries_leave_out_what_was_not_asked():
    comparison = {"metric": "edq_ratio", "axis": "step", "runs": []}
    client, seen = client_of(httpx.Response(200, json=comparison))
    client.compare(["a", "b"], "edq_ratio", points=7)
    assert seen[0].url.params.multi_items() == [
        ("run", "a"),
        ("run", "b"),
        ("metric", "edq_ratio"),
        ("points", "7"),
        ("axis", "step"),
    ]
    series: dict[str, Any] = {"run_id": "r", "metric": "loss", "layer": None, "axis": "step"}
    series |= {name: [] for name in ("first_steps", "steps", "positions", "values", "minimum", "maximum")}
    client, seen = client_of(httpx.Response(200, json=series))
    client.series("r", "loss", first_step=0)
    assert dict(seen[0].url.params) == {"metric": "loss", "points": "1000", "axis": "step", "from": "0"}


def test_all_runs_follow_the_cursor():
    def answer(request):
        cursor = request.url.params.get("cursor")
        return httpx.Response(200, json={"runs": [RUN], "cursor": None if cursor else "next"})

    client, seen = client_of(answer)
    assert len(list(client.all_runs(project="p"))) == 2
    assert [request.url.params.get("cursor") for request in seen] == [None, "next"]
    assert all(request.url.params["project"] == "p" for request in seen)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, NotAuthorised) for status in (401, 403)),
        *((status, NotFound) for status in (404, 410)),
        *((status, ServerRefusal) for status in (409, 422)),
        *((status, Unavailable) for status in (429, 500, 503)),
    ],
)
def test_refusals(status, kind):
    error = {"code": "c", "message": "too many runs", "field": "runs", "limit": 5, "request_id": "q"}
    client, _ = client_of(httpx.Response(status, json={"error": error}, headers={"Retry-After": "2"}))
    said = "set COLLAGE_TOKEN" if status == 401 else "too many runs"
    with pytest.raises(ServerRefusal, match=said) as caught:
        client.run("r")
    assert type(caught.value) is kind
    found = caught.value
    assert (found.status, found.code, found.field, found.limit, found.request_id) == (status, "c", "runs", 5.0, "q")
    assert found.retry_after_seconds == 2.0


@pytest.mark.parametrize(("token", "said"), [(None, "asks for a token"), ("wrong", "does not know this token")])
def test_a_token_is_asked_for_in_words_for_people(token, said):
    error = {"code": "unauthorised", "message": "no token; send the header Authorization: Bearer TOKEN"}
    client, _ = client_of(httpx.Response(401, json={"error": error}), token)
    with pytest.raises(NotAuthorised, match=f"http://server/? {said}: set COLLAGE_TOKEN") as caught:
        client.runs()
    assert "Bearer" not in str(caught.value)


def test_a_refusal_of_a_proxy_without_our_shape():
    client, _ = client_of(httpx.Response(502, text="<html>Bad Gateway</html>", headers={"Retry-After": "soon"}))
    with pytest.raises(Unavailable, match=r"http://server/ answers 502 .*is the address right") as caught:
        client.run("r")
    assert (caught.value.code, caught.value.retry_after_seconds) == ("unknown", None)


def test_health_and_that_nobody_answers():
    def answer(request):
        raise httpx.ConnectError("refused", request=request)

    client, _ = client_of(answer)
    with pytest.raises(ServerUnreachable, match=r"http://server .*collage-monitor up"):
        client.run("r")
    assert not client.healthy()
    client, seen = client_of(httpx.Response(200))
    with client:
        assert client.healthy()
    assert seen[0].url.path == "/healthz"
