"""Fuzzing the server: `python -m tests.server.fuzz --cases 20000`.

A third of the cases each: requests drawn from the OpenAPI description, raw bytes with all manner of headers, and
messages of the agent with their msgpack mutated. Held for every answer: no 5xx but the declared 503, errors in one
shape, JSON without bare NaN; for the process: memory bounded, and still working afterwards.
"""

import gzip
import json
import random
import resource
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import click
import hypothesis
import schemathesis
from collage_server.app import create_app
from collage_server.settings import Settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report, stream_create

MEMORY_BYTES = 400 * 2**20
"""What the process may grow by: bodies of 16 MiB are among the cases, and JSON grows when it is decoded."""
KEYS = ["code", "message", "field", "limit", "request_id"]
METRICS = ("edq_ratio", "lost_update_ratio", "state_decrement_ratio/exp_avg_sq", "loss")
POSTS = (
    *("/projects/{project}/runs", "/runs/{run_id}/attempts", "/runs/{run_id}/streams"),
    *("/streams/{stream_id}/reports", "/tokens", "/alerts/alertmanager", "/silences", "/projects/{project}/views"),
)


class Target(Server):
    """A filled server, and what it has answered so far."""

    def __init__(self, client, app):
        super().__init__(client, Clock(), app)
        self.statuses: Counter[int] = Counter()
        self.generation = 0
        self.fill()

    def fill(self):
        """A run with one stream and a few reports, under ids not used before."""
        self.generation += 1
        run_id, stream_id = f"r{self.generation}", f"s{self.generation}"
        self.ids = {"project": "p", "run_id": run_id, "stream_id": stream_id}
        self.filled(run_id, stream_id, steps=range(1, 4))

    def posted(self, path, content, headers):
        """The answer, whatever it is."""
        return self.client.post("/api/v1" + path.format(**self.ids), content=content, headers=headers)

    def check(self, answer):
        """Hold what must be true of every answer."""
        self.statuses[answer.status_code] += 1
        where = f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {answer.text[:300]}"
        assert answer.status_code < 500 or answer.status_code == 503, where
        if answer.status_code >= 400:
            body = answer.json()
            assert list(body) == ["error"], where
            assert list(body["error"]) == KEYS, where
            assert body["error"]["request_id"] == answer.headers["x-request-id"], where
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1, where
        elif answer.headers.get("content-type") == wire.JSON:
            json.loads(answer.content, parse_constant=refuse_constant)
        deleted = answer.request.method == "DELETE" and answer.status_code == 200
        if deleted and answer.request.url.path.endswith(self.ids["run_id"]):
            self.fill()


def refuse_constant(name):
    raise AssertionError(f"bare {name} in JSON")


@contextmanager
def target(folder, **settings):
    """A server without tokens on a fresh folder, so that every route is within reach."""
    app = create_app(Settings(folder=folder, no_auth=True, **settings))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield Target(client, app)


def many(cases, seed):
    """Decorator of a property: so many examples, reproducible, without a clock."""
    settings = hypothesis.settings(
        max_examples=max(cases, 1),
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda function: hypothesis.seed(seed)(settings(function))


def described(target, cases, seed):
    """Requests drawn from the OpenAPI description, half of them about things that exist."""
    schema = schemathesis.openapi.from_dict(target.app.openapi())
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) == sum(map(len, target.app.openapi()["paths"].values()))
    for index, operation in enumerate(operations):
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        drawn = st.one_of([operation.as_strategy(mode) for mode in modes])

        @many(cases // len(operations), seed + index)
        @hypothesis.given(case=drawn, known=st.booleans(), metric=st.sampled_from(METRICS))
        def ask(case, known, metric):
            if known:
                case.path_parameters |= {n: v for n, v in target.ids.items() if n in case.path_parameters}
                known_query = {"metric": metric, "run": [target.ids["run_id"]]}
                case.query |= {n: v for n, v in known_query.items() if n in case.query}
            sent = case.as_transport_kwargs(base_url="http://127.0.0.1")
            sent.pop("cookies", None)
            headers = {name: value for name, value in (sent.pop("headers", None) or {}).items() if sendable(value)}
            if isinstance(sent.get("data"), (bytes, str)):
                sent["content"] = sent.pop("data")
            target.check(target.client.request(**sent, headers=headers))

        ask()


def sendable(value):
    """Whether the client can put this into a header at all."""
    return value.isascii() and value.isprintable()


HEADERS = st.fixed_dictionaries(
    {
        "Content-Type": st.sampled_from([wire.MSGPACK, wire.JSON, "text/plain", "", "application/json; charset=x"]),
        "Content-Encoding": st.sampled_from(["identity", "gzip", "zstd", "br", ""]),
    }
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
NESTED = st.lists(LEAVES, max_size=4) | st.dictionaries(st.text(max_size=10), LEAVES, max_size=4)
LARGE = (
    *(bytes(size) for size in (2**20, 16 * 2**20, 16 * 2**20 + 1)),
    *(character * depth for character in (b"[", b"\x91") for depth in (100, 5_000, 200_000)),
    b"[" + b"1," * (2**20) + b"1]",
)
"""Made once: what the fuzz itself holds is not to be taken for what the server holds."""
BYTES = st.one_of(
    st.binary(max_size=2000),
    st.text(max_size=500).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(NESTED | LEAVES, max_size=4).map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.text(max_size=10), NESTED | LEAVES, max_size=4).map(lambda held: json.dumps(held).encode()),
    st.sampled_from(range(len(LARGE))).map(LARGE.__getitem__),
)


def raw(target, cases, seed):
    """Raw bytes to every route that takes a body; half of the encoded ones really are."""

    @many(cases, seed)
    @hypothesis.given(path=st.sampled_from(POSTS), headers=HEADERS, body=BYTES, honest=st.booleans())
    def send(path, headers, body, honest):
        content = gzip.compress(body) if headers["Content-Encoding"] == "gzip" and honest else body
        target.check(target.posted(path, content, headers))

    send()


def mutated(target, cases, seed):
    """The agent's messages with bytes of their msgpack changed, cut out, doubled or inserted."""
    numbers = random.Random(seed)
    gap = wire.ReportGap(first_seq=900, last_seq=901, reason="full")
    for index in range(cases):
        alert = wire.AlertmanagerAlert(status="firing", labels={"run_id": target.ids["run_id"]})
        messages = (
            wire.RunCreate(run_id=f"fuzz-{index % 50}", config={"lr": 1e-3, "x": [1, "a", None]}, tags=["t"]),
            wire.AttemptCreate(launch_id="launch", first_step=1),
            stream_create(f"fuzz-{index % 50}-s", "launch"),
            wire.ReportBatch(reports=[report(3 + index % 100, 5)], gaps=[gap]),
            wire.TokenCreate(name="n", role="read", projects=["p"]),
            wire.AlertmanagerMessage(alerts=[alert]),
            wire.SilenceCreate(seconds=60.0, run_id=target.ids["run_id"]),
            wire.SavedViewCreate(name=f"view {index % 50}", search="strategy=plain&sort=name"),
        )
        place = numbers.randrange(len(POSTS))
        body = bytearray(wire.encode_message(messages[place]))
        for _ in range(numbers.choice((1, 1, 2, 5))):
            mutate(body, numbers)
        target.check(target.posted(POSTS[place], bytes(body), {"Content-Type": wire.MSGPACK}))


def mutate(body, numbers):
    """One random change, mostly near the beginning: the blocks of numbers behind take any bytes anyway."""
    at = int(len(body) * numbers.random() ** 3)
    kind = numbers.randrange(5)
    if kind == 0 and at < len(body):
        body[at] ^= 1 << numbers.randrange(8)
    elif kind == 1 and at < len(body):
        body[at] = numbers.choice((0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xCB, 0xCF, 0xD3, 0xDD, 0xDF, 0xFF))
    elif kind == 2:
        del body[at : at + numbers.choice((1, 2, 8, 100))]
    elif kind == 3:
        body[at:at] = body[at : at + numbers.choice((1, 4, 30))]
    else:
        body[at:at] = numbers.randbytes(numbers.choice((1, 4, 9)))


def fuzz(folder, cases, seed, **settings):
    """All three kinds against one server; the statuses that were answered, and what memory grew by (bytes)."""
    with target(folder, **settings) as reached:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        described(reached, cases // 3, seed)
        raw(reached, cases // 3, seed + 1000)
        # Hypothesis may draw fewer than it is asked for; here is made up for it.
        mutated(reached, cases - sum(reached.statuses.values()), seed + 2000)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown < MEMORY_BYTES, f"the process grew by {grown / 2**20:.0f} MiB"
        assert reached.state.memory.bodies.bytes == 0
        assert reached.client.get("/readyz").status_code == 200
        reached.fill()
        return reached.statuses, grown


@click.command()
@click.option("--cases", default=20_000, show_default=True)
@click.option("--seed", type=int, help="Default: a random one, printed.")
@click.option("--database", help="A PostgreSQL URL instead of SQLite.")
def main(cases, seed, database):
    """Fuzz the server in this process."""
    chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
    click.echo(f"seed {chosen}")
    settings = {"database": database} if database else {}
    with tempfile.TemporaryDirectory() as folder:
        statuses, grown = fuzz(Path(folder), cases, chosen, **settings)
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    click.echo(f"{sum(statuses.values())} answers ({counts}); memory grew by {grown / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
