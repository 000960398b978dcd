"""A server that asks for tokens, and clients that bear one each."""

from contextlib import contextmanager

from collage_server.app import create_app
from collage_server.settings import FIXED_LIMITS, Settings
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.migrated import put_migrated
from tests.server.samples import report, stream_create

OWN = "the-server-s-own-token-0123456789abcdefghij"
PROJECTS = ("mine", "theirs")


class GuardedServer(Server):
    """The application and its clock; `ask` sends a request with any secret."""

    def ask(self, method, path, secret=OWN, message=None, **headers):
        is_ready = message is None or isinstance(message, bytes)
        content = message or b"" if is_ready else wire.encode_message(message)
        given = {"Content-Type": wire.MSGPACK} | headers
        if secret is not None:
            given["Authorization"] = f"Bearer {secret}"
        return self.client.request(method, path, content=content, headers=given)

    def token(self, role, projects=None, name="a token"):
        """A new token as (secret, Token)."""
        create = wire.TokenCreate(name=name, role=role, projects=projects)
        answer = self.ask("POST", "/api/v1/tokens", message=create)
        assert answer.status_code == 201, answer.text
        created = wire.decode_message(answer.content, wire.TokenCreated, wire.JSON)
        return created.secret, created.token

    def audit_log(self):
        answer = self.ask("GET", "/api/v1/audit")
        return wire.decode_message(answer.content, wire.AuditLogPage, wire.JSON).acts

    def fill(self, project, run_id, secret=OWN):
        """A run with one report, on the stream `RUN_ID-s`."""
        stream = stream_create(f"{run_id}-s", f"{run_id}-launch")
        batch = wire.ReportBatch(reports=[report(0, 10)])
        for path, message in (
            (f"/projects/{project}/runs", wire.RunCreate(run_id=run_id)),
            (f"/runs/{run_id}/attempts", wire.AttemptCreate(launch_id=f"{run_id}-launch", first_step=1)),
            (f"/runs/{run_id}/streams", stream),
            (f"/streams/{run_id}-s/reports", batch),
        ):
            answer = self.ask("POST", "/api/v1" + path, secret, message)
            assert answer.is_success, answer.text


@contextmanager
def guarded_server(folder, limits=FIXED_LIMITS, **settings):
    """A guarded application on a fresh folder."""
    clock = Clock()
    put_migrated(folder)
    app = create_app(Settings(folder=folder, token=OWN, **settings), clock=clock, limits=limits)
    with TestClient(app) as client:
        yield GuardedServer(client, clock, app)
