"""`Client.frame`: runs as one Arrow table, out of the server's own export."""

import builtins

import httpx
import polars
import pytest

from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotFound
from tests.server.samples import LAYERS, block


@pytest.fixture
def client(server):
    """The HTTP client, whose requests the application answers in this process."""

    def answer(request):
        found = server.client.request(request.method, str(request.url), headers=dict(request.headers))
        return httpx.Response(
            found.status_code, content=found.content, headers={"content-type": "application/json"}
        )

    with Client("http://127.0.0.1", transport=httpx.MockTransport(answer)) as client:
        yield client


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
