"""An application on a fresh folder, a clock that stands still, and a client that speaks the wire."""

from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from collage_server.app import create_app
from collage_server.settings import Settings
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.migrated import put_migrated
from tests.server.samples import report, stream_create
from tests.waiting import PATIENCE_SECONDS

NOW = 1_700_000_000.0


def share_compiled_statements():
    """What SQLAlchemy compiles for one engine serves those of all tests: compiling anew took a third of a test.

    One cache for all; a dialect is the key that another one of its kind and version is.
    """
    cache: LRUCache[Any, Any] = LRUCache(2000)
    made = Engine.__init__

    def with_shared_cache(engine, *arguments, **more):
        made(engine, *arguments, **more)
        engine._compiled_cache = cache

    def kind(dialect):
        return type(dialect), getattr(dialect, "server_version_info", None)

    Engine.__init__ = with_shared_cache  # type: ignore[assignment, method-assign]
    DefaultDialect.__hash__ = lambda dialect: hash(type(dialect))  # type: ignore[assignment, method-assign]
    DefaultDialect.__eq__ = lambda one, other: kind(one) == kind(other)  # type: ignore[method-assign]


share_compiled_statements()


class Clock:
    """Unix seconds that move only when told."""

    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


class Server:
    """A running application behind a client: messages in, decoded answers out."""

    def __init__(self, client, clock, app):
        self.client = client
        self.clock = clock
        self.app = app

    @property
    def state(self):
        return self.app.state.collage

    @property
    def store(self):
        return self.state.store

    def stop_threads(self):
        """What the threads beside them may or may not have done by then is left to the requests."""
        for thread in (self.state.summariser, self.state.sealer):
            thread.stop(PATIENCE_SECONDS)

    def send(self, method, path, message=None, kind=None, status=200, encode=wire.encode_message, headers=None):
        content = b"" if message is None else message if isinstance(message, bytes) else encode(message)
        given = {"Content-Type": wire.MSGPACK} | (headers or {})
        prefix = "" if path.startswith(("/metrics", "/healthz", "/readyz")) else "/api/v1"
        response = self.client.request(method, prefix + path, content=content, headers=given)
        assert response.status_code == status, response.text
        if status >= 400:
            return wire.decode_message(response.content, wire.ErrorAnswer, wire.JSON).error
        return response.text if kind is None else wire.decode_message(response.content, kind, wire.JSON)

    def post(self, path, message, kind=None, status=200, **more):
        return self.send("POST", path, message, kind, status, **more)

    def get(self, path, kind=None, status=200):
        if path == "/metrics":
            self.state.summariser.keep_points()
        return self.send("GET", path, None, kind, status)

    def transport(self, asked=None):
        """A network for clients that ends in this server; `asked` notes every request, as "METHOD /path"."""

        def forward(request):
            if asked is not None:
                asked.append(f"{request.method} {request.url.path}")
            path, headers = request.url.raw_path.decode(), dict(request.headers)
            answer = self.client.request(request.method, path, content=request.content, headers=headers)
            return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

        return httpx.MockTransport(forward)

    def run(self, run_id="r1", project="p", **more):
        return self.post(f"/projects/{project}/runs", wire.RunCreate(run_id=run_id, **more), wire.Run, status=201)

    def attempt(self, run_id="r1", launch_id="launch-1", first_step=1):
        create = wire.AttemptCreate(launch_id=launch_id, first_step=first_step)
        return self.post(f"/runs/{run_id}/attempts", create, wire.Attempt)

    def stream(self, run_id="r1", **more):
        return self.post(f"/runs/{run_id}/streams", stream_create(**more), wire.Stream)

    def ranks(self, count):
        """A run of so many ranks, a stream each."""
        self.run()
        self.attempt()
        for rank in range(count):
            self.stream(stream_id=f"s{rank}", rank=rank, world_size=count)

    def reports(self, reports, stream_id="s0", status=200):
        batch = wire.ReportBatch(reports=list(reports))
        path = f"/streams/{stream_id}/reports"
        return self.post(path, batch, wire.BatchAnswer, status, encode=wire.encode_batch)

    def sent(self, *reports, stream_id="s0", body=None, **headers):
        """The answer itself to these reports, or to a body that stands for them."""
        content = wire.encode_batch(wire.ReportBatch(reports=list(reports))) if body is None else body
        given = {"Content-Type": wire.MSGPACK} | headers
        return self.client.post(f"/api/v1/streams/{stream_id}/reports", content=content, headers=given)

    def finish(self, run_id="r1"):
        """The run is over, and all of it is sealed."""
        self.send("PATCH", f"/runs/{run_id}", wire.RunUpdate(state="finished"), wire.Run)
        self.seal(run_id)

    def seal(self, run_id="r1", **more):
        """All that is due of a run."""
        while self.store.sealing.seal(run_id, self.clock(), **more):
            pass

    def series(self, metric, run_id="r1", **query):
        asked = "&".join(f"{name}={value}" for name, value in {"metric": metric, **query}.items())
        return self.get(f"/runs/{run_id}/series?{asked}", wire.Series)

    def compare(self, *run_ids, **query):
        """The runs of a comparison."""
        asked = "&".join([*(f"run={run_id}" for run_id in run_ids), *(f"{key}={query[key]}" for key in query)])
        return self.get(f"/compare?{asked}", wire.Comparison).runs

    def filled(self, run_id="r1", stream_id="s0", steps=range(10, 60, 10), **more):
        """A run with one attempt, one stream, and a report a step."""
        self.run(run_id, **more)
        self.attempt(run_id)
        self.stream(run_id, stream_id=stream_id)
        return self.reports([report(i, step) for i, step in enumerate(steps)], stream_id)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def settings(tmp_path):
    put_migrated(tmp_path)
    return Settings(folder=tmp_path, no_auth=True)


@contextmanager
def running(settings, clock=None, **more):
    """A `Server` on these settings; without a clock its times are the database's."""
    app = create_app(settings, clock=clock, **more)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield Server(client, clock or Clock(), app)


@pytest.fixture
def server(settings, clock):
    with running(settings, clock) as server:
        yield server


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A server with one run, for all tests of a module that only ask."""
    folder = tmp_path_factory.mktemp("filled")
    put_migrated(folder)
    with running(Settings(folder=folder, no_auth=True), Clock()) as server:
        server.filled()
        yield server


@contextmanager
def holding(budget, size):
    """Hold `size` bytes of a whole body in a budget of bytes in flight, as the route of reports does."""
    budget.admit(size)
    with budget.receive(()) as lease:
        lease.resize(size)
        yield lease
