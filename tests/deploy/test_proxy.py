"""The proxy as it is shipped, before a real server: TLS, who asks, and its limits, over real sockets."""

import os
import socket
import ssl
from contextlib import contextmanager

import httpx
import pytest
from collage_agent.doctor import delivery_checks
from collage_agent.run_settings import DeliveryLimits
from collage_agent.transport.http import HttpTransport
from collage_server.api import bodies

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import ServerUnreachable
from tests.deploy.secrets import ROOT, Secrets
from tests.ports import command, free_port, running
from tests.server.guarded import OWN
from tests.server.migrated import put_migrated
from tests.server.sockets import HEAD, everything, listening, status_of
from tests.system import require
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

CONFIGURATION = ROOT / "server/deploy/nginx.conf"
ELSEWHERE = "127.0.0.9"
CLOSE = b"Connection: close\r\n\r\n"


class Proxied:
    """A server behind the proxy: the proxy's ports, and what its certificate needs."""

    def __init__(self, server, secrets, ports):
        self.server = server
        self.secrets = secrets
        self.ports = ports
        self.certificate = secrets.folder / "certificate/certificate.pem"

    @property
    def url(self):
        return f"https://localhost:{self.ports['server']}"

    def connect(self, source="127.0.0.1", service="server"):
        trusted = ssl.create_default_context(cafile=self.certificate)
        place = ("127.0.0.1", self.ports[service])
        plain = socket.create_connection(place, timeout=PATIENCE_SECONDS, source_address=(source, 0))
        return trusted.wrap_socket(plain, server_hostname="localhost")

    def ask(self, request, **place):
        with self.connect(**place) as client:
            client.sendall(request)
            return everything(client)

    def begun(self, size):
        """A connection that has sent the beginning of a body, and the server has it."""
        before = self.server.app_state.memory.bodies.arriving
        client = self.connect()
        client.sendall(head(f"Content-Length: {2 * size}") + b"\x80" * size)
        until(lambda: self.server.app_state.memory.bodies.arriving >= before + size, "the body's beginning")
        return client


def head(*lines, method="POST", path="/api/v1/streams/none/reports"):
    told = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {OWN}"]
    return "\r\n".join([*told, "Content-Type: application/msgpack", *lines, "", ""]).encode()


def configuration(folder, secrets, ports, upstream, changed):
    """The shipped file with this test's places, and whatever else is changed; all of it must stand there."""
    text = CONFIGURATION.read_text()
    places = {
        # First, because the other places of a test may lie below it.
        "/tmp/": f"{folder}/",
        "/secrets/": f"{secrets.folder}/",
        "listen 7420": f"listen 127.0.0.1:{ports['server']}",
        "listen 7421": f"listen 127.0.0.1:{ports['dashboard']}",
        "listen 7422": f"listen 127.0.0.1:{ports['grafana']}",
        "127.0.0.1:7429": f"127.0.0.1:{ports['health']}",
        **dict.fromkeys(("server:7420", "dashboard:7421", "grafana:3000"), f"127.0.0.1:{upstream}"),
    }
    for shipped, here in (places | changed).items():
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    return text


@contextmanager
def proxied(tmp_path, **changed):
    """`Proxied`; `changed` by what stands in the shipped file."""
    program = require("nginx")
    secrets, ports = Secrets(tmp_path), {name: free_port() for name in ("server", "dashboard", "grafana", "health")}
    assert secrets.run("start", COLLAGE_NAME="localhost").returncode == 0
    (tmp_path / "data").mkdir()
    put_migrated(tmp_path / "data")
    settings = {"token": OWN, "trusted_proxies": ("127.0.0.1",), "allowed_hosts": ("monitor.example",)}
    with listening(tmp_path / "data", **settings) as server:
        written = tmp_path / "nginx.conf"
        written.write_text(configuration(tmp_path, secrets, ports, server.port, changed))
        options = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
        arguments = [program, "-p", str(tmp_path), "-e", "stderr", "-c", str(written), "-g", options]
        with running(arguments, f"http://127.0.0.1:{ports['health']}/healthz", tmp_path / "nginx.log"):
            yield Proxied(server, secrets, ports)


def test_every_client_takes_the_certificate_that_it_is_told_to_trust(tmp_path, monkeypatch):
    with proxied(tmp_path) as proxy:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with Client(proxy.url, OWN) as client, pytest.raises(ServerUnreachable):
            client.tokens()
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.certificate))
        with Client(proxy.url, OWN) as client:
            assert client.tokens().tokens == []
            agents = client.create_token(wire.TokenCreate(name="agents", role="ingest", projects=None))
        environment = {"COLLAGE_SERVER_URL": proxy.url, "COLLAGE_TOKEN": agents.secret}
        environment |= {"COLLAGE_DIR": str(tmp_path)}
        assert [check.status for check in delivery_checks(environment) if check.name == "server"] == ["ok"]
        transport = HttpTransport(proxy.url, lambda: OWN, DeliveryLimits())
        assert transport.answers()
        transport.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        with pytest.raises(ServerUnreachable, match="SSL_CERT_FILE"):
            Client(proxy.url, OWN)
        # It says nothing about a server without TLS.
        with Client(f"http://127.0.0.1:{proxy.server.port}", OWN) as client:
            assert client.tokens().tokens == [agents.token]


def test_the_server_knows_who_asked_whatever_they_say(tmp_path):
    body = wire.encode_message(wire.TokenCreate(name="x", role="read", projects=None))
    with proxied(tmp_path) as proxy:
        told = head("X-Forwarded-For: 192.0.2.1", f"Content-Length: {len(body)}", path="/api/v1/tokens")
        with proxy.connect(ELSEWHERE) as client:
            client.sendall(told + body)
            assert status_of(client.recv(65536)) == 201
        with httpx.Client(base_url=f"http://127.0.0.1:{proxy.server.port}", trust_env=False) as direct:
            entries = direct.get("/api/v1/audit", headers={"Authorization": f"Bearer {OWN}"}).json()["acts"]
    assert [entry["client"] for entry in entries] == [ELSEWHERE]


@contextmanager
def behind(tmp_path, proxy_address):
    """The dashboard that believes this address of a proxy, behind the shipped one: a client of its port."""
    port = free_port()
    with proxied(tmp_path, **{"dashboard:7421": f"127.0.0.1:{port}"}) as proxy:
        told = ("--server-url", f"http://127.0.0.1:{proxy.server.port}", "--token", OWN, "--port", port)
        names = ("--allowed-host", "monitor.example", "--trusted-proxy", proxy_address)
        arguments = command("serve", "dashboard", *told, *names)
        trusted = ssl.create_default_context(cafile=proxy.certificate)
        address = f"https://localhost:{proxy.ports['dashboard']}"
        with (
            running(arguments, f"http://127.0.0.1:{port}/healthz", tmp_path / "dashboard.log"),
            httpx.Client(base_url=address, trust_env=False, verify=trusted, timeout=PATIENCE_SECONDS) as client,
        ):
            yield client


@pytest.mark.parametrize(("proxy_address", "secure"), [("127.0.0.1", True), ("192.0.2.9", False)])
def test_the_dashboard_alone_asks_who_comes_and_believes_the_named_proxy(tmp_path, proxy_address, secure):
    with behind(tmp_path, proxy_address) as client:
        stranger = client.get("/", follow_redirects=True)
        assert stranger.url.path == "/sign-in"
        assert "WWW-Authenticate" not in stranger.headers
        # Its own token is nobody's key, and it is asked for under a name that is its own.
        assert client.get("/_dash-layout", headers={"Authorization": f"Bearer {OWN}"}).status_code == 401
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        entered = client.post("/sign-in", data={"token": OWN})
        assert entered.status_code == 303
        # What the proxy says of HTTPS counts only if it is the proxy that was named.
        assert ("; Secure" in entered.headers["Set-Cookie"]) is secure
        session = entered.headers["Set-Cookie"].partition(";")[0]
        assert client.get("/_dash-layout", headers={"Cookie": session}).is_success


def test_heads_and_bodies_beyond_their_size_are_refused(tmp_path):
    with proxied(tmp_path) as proxy:
        assert status_of(proxy.ask(HEAD + b"X-Long: " + b"x" * 2**17 + b"\r\n" + CLOSE)) == 400
        many = b"".join(b"x-%d: %s\r\n" % (place, b"x" * 2**12) for place in range(20))
        assert status_of(proxy.ask(HEAD + many + CLOSE)) == 400
        assert status_of(proxy.ask(HEAD + b"X-Long: " + b"x" * 2**13 + b"\r\n" + CLOSE)) == 200
        assert status_of(proxy.ask(head(f"Content-Length: {2**24 + 1}"))) == 413


def test_who_is_silent_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.2)
    short = {f"{name} 10s": f"{name} 1s" for name in ("client_header_timeout", "keepalive_timeout")}
    with proxied(tmp_path, **short) as proxy:
        with proxy.connect() as half, proxy.connect() as idle:
            half.sendall(HEAD)
            idle.sendall(HEAD + b"\r\n")
            assert everything(idle).count(b"HTTP/1.1 200") == 1
            assert b"HTTP/1.1 200" not in everything(half)
        # The server's own deadline for bodies holds through the proxy.
        with proxy.begun(10) as slow:
            assert b"did not arrive within" in everything(slow)


def test_one_address_has_its_share_of_requests_and_another_its_own(tmp_path):
    with proxied(tmp_path, **{"limit_conn address 200": "limit_conn address 2"}) as proxy:
        held = [proxy.begun(100) for _ in range(2)]
        assert status_of(proxy.ask(HEAD + CLOSE)) == 429
        assert status_of(proxy.ask(HEAD + CLOSE, source=ELSEWHERE)) == 200
        for client in held:
            client.close()
        until(lambda: status_of(proxy.ask(HEAD + CLOSE)) == 200, "the share, given back")
