"""`Client.frame`: runs as one Arrow table, out of the server's own export."""

import builtins

import httpx
import polars
import pytest

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotFound
from collage_monitor.local import Login, keep_login, server_address
from tests.server.samples import LAYERS, block


@pytest.fixture
def client(server):
    with Client("http://127.0.0.1", transport=server.transport()) as client:
        yield client


@pytest.mark.slow
def test_a_selection_of_runs_is_one_table(server, client):
    server.filled("r1", "s1", steps=range(10, 60, 10))
    server.filled("r2", "s2", steps=range(10, 40, 10), project="q")
    frame = polars.DataFrame(client.frame(["r1", "r2"]))
    assert frame["run"].to_list() == ["r1"] * 20 + ["r2"] * 12
    model = frame.filter(polars.col("layer").is_null())
    assert model["step"].to_list() == [10, 20, 30, 40, 50, 10, 20, 30]
    assert model["edq_ratio"].to_list()[:5] == server.series("edq_ratio").values
    assert model["loss"].to_list()[5:] == [3.9, 3.8, 3.7]
    one = frame.filter((polars.col("run") == "r2") & (polars.col("layer") == LAYERS[1]))
    assert one["lost"].to_list() == [block(step)[6, 1] for step in (10, 20, 30)]
    assert client.frame(project="q", layers=False).num_rows == 3
    assert client.frame("r1", layers=False).column("run").to_pylist() == ["r1"] * 5


@pytest.mark.slow
def test_runs_are_a_table_with_what_is_said_of_each(server, client):
    """A column of several kinds is text: Arrow refused them."""
    kinds = ({"mixed": 0.1, "warm": True, "steps": 1}, {"mixed": "auto", "warm": 1, "steps": 2.5})
    server.filled("r1", "s1", name="one", config={"lr": 0.1, "note": {"a": [1]}, **kinds[0]}, tags=["x"])
    server.filled("r2", "s2", name="two", config={"lr": 0.2, **kinds[1]})
    overview = server.get("/runs/r1/overview", wire.Overview)
    frame = client.runs_frame(config=["lr", "none"]).to_pandas().set_index("run_id")
    assert sorted(frame.index) == ["r1", "r2"]
    one = frame.loc["r1"]
    assert (one["name"], one["project"], list(one["tags"]), one["last_step"]) == ("one", "p", ["x"], 50)
    assert (one["health"], one["judged_step"]) == (overview.health, overview.last_step)
    assert one["edq_ratio"] == pytest.approx(overview.numbers["edq_ratio"])
    assert one["loss"] == 3.5
    assert list(frame["config.lr"].sort_values()) == [0.1, 0.2]
    assert frame["config.none"].isna().all()
    rows = {row["run_id"]: row for row in client.runs_frame(config=["mixed", "warm", "steps"]).to_pylist()}
    for name, values in (("mixed", ["0.1", "auto"]), ("warm", ["True", "1"]), ("steps", [1.0, 2.5])):
        assert [rows[run][f"config.{name}"] for run in ("r1", "r2")] == values
    assert client.runs_frame(project="none").num_rows == 0


@pytest.mark.slow
def test_layers_are_a_table_with_metrics_over_the_steps_that_are_asked_for(server, client):
    server.filled("r1", "s1")
    frame = polars.DataFrame(client.layers_frame("r1", ["edq_ratio"], first_step=20, last_step=40))
    assert frame["layer"].to_list() == LAYERS
    assert frame["shape"].to_list() == [[8, 16]] * 3
    merged = [server.series("edq_ratio", layer=name, points=1, **{"from": 20, "to": 40}).values for name in LAYERS]
    assert frame["edq_ratio"].to_list() == [value for (value,) in merged]


def test_a_client_without_an_address_speaks_to_the_server_that_the_command_would_ask(monkeypatch, tmp_path):
    with Client() as found:
        assert found.server_url == server_address()
    keep_login(Login("http://team:1", "of-login"))
    sent = []

    def answer(request):
        sent.append((str(request.url.join("/")), request.headers.get("Authorization")))
        return httpx.Response(200, json={"runs": [], "cursor": None})

    def ask(*given):
        with Client(*given, transport=httpx.MockTransport(answer)) as client:
            client.runs()
        return sent[-1]

    assert ask() == ("http://team:1/", "Bearer of-login")
    assert ask("http://team:1") == ("http://team:1/", None), "a named server gets the token that is passed alone"
    assert ask("http://other:1", "mine") == ("http://other:1/", "Bearer mine")
    monkeypatch.setenv("COLLAGE_SERVER_URL", "http://variable:1")
    assert ask() == ("http://variable:1/", None), "the token of the log-in is for its server alone"
    monkeypatch.setenv("COLLAGE_TOKEN", "of-variable")
    assert ask() == ("http://variable:1/", "Bearer of-variable")


def test_what_cannot_be_had_is_said(server, client, monkeypatch):
    with pytest.raises(NotFound):
        client.frame("none")
    with pytest.raises(CollageError, match=r"no run is left by \{'project': 'none'\}"):
        client.frame(project="none")
    imported = builtins.__import__

    def absent(name, *more):
        if name == "pyarrow":
            raise ModuleNotFoundError(name=name)
        return imported(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(CollageError, match=r"pip install 'collage-monitor\[parquet\]'"):
        client.frame("r1")
