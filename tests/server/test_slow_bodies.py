"""Bodies that come slowly or not at all, over real sockets: they hold what has come, and nobody else pays."""

from __future__ import annotations

import pytest
from collage_server.api import bodies
from collage_server.errors import Busy
from collage_server.memory_budget import BodyBudget

from collage_monitor import wire
from tests.server.guarded import OWN
from tests.server.samples import report, stream_create
from tests.server.sockets import everything, listening, status_of
from tests.waiting import until

pytestmark = pytest.mark.slow


def head(path, secret=OWN, **headers):
    lines = [f"POST /api/v1{path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {secret}"]
    lines += ["Content-Type: application/msgpack", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def posted(server, path, message, secret=OWN, encode=wire.encode_message):
    body = encode(message)
    more = {"Content-Length": len(body), "Connection": "close"}
    return server.ask(head(path, secret, **more) + body)


def token(server, role="ingest", project=None):
    create = wire.TokenCreate(name="a token", role=role, projects=[project] if project else None)
    answer = posted(server, "/tokens", create)
    assert status_of(answer) == 201, answer
    return wire.decode_message(answer.partition(b"\r\n\r\n")[2], wire.TokenCreated, wire.JSON).secret


def prepare(server, project):
    """A run of the project with a stream; both have its name."""
    stream = stream_create(project, f"{project}-launch")
    for path, message in (
        (f"/projects/{project}/runs", wire.RunCreate(run_id=project)),
        (f"/runs/{project}/attempts", wire.AttemptCreate(launch_id=f"{project}-launch", first_step=1)),
        (f"/runs/{project}/streams", stream),
    ):
        assert status_of(posted(server, path, message)) in (200, 201)


def sent(server, stream, seq, secret=OWN):
    batch = wire.ReportBatch(reports=[report(seq, 10 * seq + 10)])
    return status_of(posted(server, f"/streams/{stream}/reports", batch, secret, wire.encode_batch))


def begun(server, size, stream="slow", secret=OWN, **headers):
    """A connection that has sent its head and `size` bytes of its body, all of them received."""
    client = server.connect()
    before = server.app_state.memory.bodies.arriving
    client.sendall(head(f"/streams/{stream}/reports", secret, **headers))
    chunk = b"%x\r\n" % size + b"\x80" * size + b"\r\n" if "Transfer-Encoding" in headers else b"\x80" * size
    client.sendall(chunk if size else b"")
    until(lambda: server.app_state.memory.bodies.arriving >= before + size, "the body's beginning")
    return client


@pytest.fixture
def server(tmp_path):
    with listening(tmp_path, token=OWN, limits={"in_flight_bytes": 2**24}) as server:
        for project in ("slow", "quick"):
            prepare(server, project)
        yield server


def test_idle_chunked_bodies_keep_nobody_out(server):
    idle = [begun(server, 0, **{"Transfer-Encoding": "chunked"}) for _ in range(8)]
    assert [sent(server, "quick", seq) for seq in range(4)] == [200] * 4
    for client in idle:
        client.close()


def test_a_slow_sender_after_a_slow_commit_keeps_nobody_out(server):
    server.app_state.memory.bodies.waited(1.0, 1)
    assert server.app_state.memory.bodies.allowed == 2**20
    slow = begun(server, 3 * 2**20, **{"Content-Length": 8 * 2**20})
    assert [sent(server, "quick", seq) for seq in range(4)] == [200] * 4
    slow.close()
    until(lambda: server.app_state.memory.bodies.arriving == 0, "its room")


def test_a_token_and_a_project_leave_room_for_others(server):
    mine, theirs = token(server, project="slow"), token(server, project="quick")
    limit = server.app_state.memory.bodies.limit
    held = [begun(server, limit // 5, secret=mine, **{"Content-Length": limit}) for _ in range(2)]
    with server.connect() as client:
        client.sendall(head("/streams/slow/reports", mine, **{"Content-Length": limit // 5, "Connection": "close"}))
        client.sendall(b"\x80" * (limit // 5))
        assert status_of(everything(client)) == 503
    assert sent(server, "quick", 0, theirs) == 200
    assert sent(server, "slow", 0, mine) == 200, "what is small fits into what is left of the share"
    for client in held:
        client.close()


def test_a_share_is_of_the_token_and_of_the_project():
    budget = BodyBudget(100)
    with budget.receive(["token a", "project p"]) as first, budget.receive(["token b", "project p"]) as second:
        first.arrive(40)
        with pytest.raises(Busy, match="project p holds 40 bytes"):
            second.arrive(30)
        with budget.receive(["token b", "project q"]) as third:
            third.arrive(30)
            with pytest.raises(Busy, match="token b holds 30"):
                third.arrive(10)
        first.resize(50)
        assert (budget.bytes, budget.arriving) == (50, 0)
    assert (budget.bytes, budget.arriving, dict(budget.held_by)) == (0, 0, {})


def test_a_body_is_waited_for_as_long_as_it_comes(server, monkeypatch):
    """Whoever sends something is given time for more; who sends nothing is not, whatever the header promised."""
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.2)
    with begun(server, 10, **{"Transfer-Encoding": "chunked"}) as client:
        assert b"did not arrive within" in everything(client)
    monkeypatch.setattr(bodies, "_SLOWEST_BYTES_A_SECOND", 1)
    batch = wire.encode_batch(wire.ReportBatch(reports=[report(0, 10)]))
    client = server.connect()
    client.sendall(head("/streams/quick/reports", **{"Content-Length": len(batch), "Connection": "close"}))
    client.sendall(batch[:60])
    until(lambda: server.app_state.memory.bodies.arriving == 60, "the beginning")
    with begun(server, 0, **{"Transfer-Encoding": "chunked"}) as idle:
        assert status_of(everything(idle)) == 503, "begun later, and given up before"
    client.sendall(batch[60:])
    assert status_of(everything(client)) == 200
    client.close()
