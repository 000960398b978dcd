"""The verb `serve dashboard`: its options, its token, its refusals."""

import json
import socket
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from collage_dashboard import command

from collage_monitor.local import LOOPBACK_HOSTS
from tests import ports
from tests.forking import SERVICES, run_command

pytestmark = pytest.mark.slow


@pytest.fixture
def served(monkeypatch):
    """What would be served: waitress's server stands in for itself without ever running."""
    seen: dict = {}

    def create_server(application, **options):
        seen.update(options, application=application)
        return SimpleNamespace(run=lambda: seen.update(ran=True))

    def create_dashboard(factory, **more):
        seen.update(more, factory=factory)
        return SimpleNamespace(server=object())

    listening = SimpleNamespace(getsockname=lambda: ("", 7421), close=lambda: None)
    monkeypatch.setattr("waitress.server.create_server", create_server)
    monkeypatch.setattr(command, "listening_sockets", lambda host, port: [listening])
    monkeypatch.setattr(command, "create_dashboard", create_dashboard)
    return seen


def call(*arguments, **more):
    """The verb, called with these words."""
    return CliRunner().invoke(command.dashboard, [str(word) for word in arguments], **more)


def test_sigterm_ends_it_by_its_own_will(tmp_path):
    """In a container it is the first process, which a signal without a handler does not end."""
    port = ports.free_port()
    arguments = ports.command("serve", "dashboard", "--port", port, "--server-url", "http://127.0.0.1:9")
    with ports.running(arguments, f"http://127.0.0.1:{port}/healthz", tmp_path / "log") as process:
        assert process.poll() is None
    assert process.poll() == 0


def test_the_token_file_is_read_and_the_address_printed_as_json(served, tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    options = ("--server-url", "http://127.0.0.1:9", "--json")
    result = call(*options, "--token-file", file, env={"COLLAGE_TOKEN": ""})
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"dashboard_url": "http://127.0.0.1:7421"}
    with served["factory"]() as client:
        assert client._http.headers["Authorization"] == "Bearer secret"
    assert served["ran"]


HERE = ("http://localhost:*", "http://127.0.0.1:*")
WIKI = "https://wiki.example.org"
FORWARDED = {"x-forwarded-for", "x-forwarded-proto"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--host 127.0.0.1", {"allowed_hosts": LOOPBACK_HOSTS, "embed_in": HERE, "asks": False}),
        ("--host 0.0.0.0 --allowed-host box.lan", {"allowed_hosts": LOOPBACK_HOSTS | {"box.lan"}, "asks": True}),
        ("--sign-in", {"embed_in": (), "asks": True}),
        (f"--sign-in --embed-in {WIKI}", {"embed_in": (WIKI,)}),
        (
            "--trusted-proxy 10.0.0.1",
            {"trusted_proxy": "10.0.0.1", "trusted_proxy_headers": FORWARDED, "asks": True},
        ),
    ],
)
def test_names_frames_and_proxies_are_as_stated_and_nothing_is_open_beyond_loopback(served, arguments, expected):
    result = call("--token", "t", *arguments.split())
    assert result.exit_code == 0, result.output
    served["asks"] = served["sign_in"] is not None
    assert {name: served[name] for name in expected} == expected
    with served["factory"]() as client:
        assert client._http.headers["Authorization"] == "Bearer t"


def test_a_missing_token_file_is_an_error_that_names_it(tmp_path):
    missing = str(tmp_path / "none")
    result = call("--token-file", missing, env={"COLLAGE_TOKEN": ""})
    assert result.exit_code != 0
    assert missing in result.output


def test_a_port_in_use_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_command(SERVICES, "serve", "dashboard", "--port", port, "--token", "t")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "another --port" in result.stderr


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        *(
            ("--embed-in", given, repr(given))
            for given in ("wiki.example.org", "*", "https://a.org/b", "https://a.org; script-src *")
        ),
        ("--host", "0.0.0.0", "--allowed-host"),
    ],
)
def test_what_is_no_origin_and_an_address_beyond_loopback_without_names_are_refused(served, option, given, told):
    refused = call("--token", "t", option, given)
    assert refused.exit_code == 2
    assert told in refused.output
    assert served == {}


def resolve_to(monkeypatch, *addresses):
    """Every name has these addresses."""
    resolve = socket.getaddrinfo

    def resolved(_host, *more, **named):
        return [found for address in addresses for found in resolve(address, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch):
    """As ::1 of `localhost` in a container without IPv6."""
    resolve_to(monkeypatch, "192.0.2.1", "127.0.0.1")
    (listening,) = command.listening_sockets("localhost", 0)
    with listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_name_whose_only_address_is_elsewhere_is_refused(monkeypatch):
    resolve_to(monkeypatch, "192.0.2.1")
    with pytest.raises(OSError, match="assign requested address"):
        command.listening_sockets("localhost", 0)


def test_a_name_of_several_addresses_is_served_on_one_port(monkeypatch):
    """`localhost` is 127.0.0.1 and ::1 on most machines."""
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2")
    ports: list[int] = []

    def run(server):
        ports.extend(port for _host, port in server.effective_listen)
        server.close()

    monkeypatch.setattr("waitress.server.MultiSocketServer.run", run)
    result = call("--host", "localhost", "--port", "0", "--token", "t", "--json", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first, second = ports
    assert first == second
    assert json.loads(result.output) == {"dashboard_url": f"http://localhost:{first}"}


def test_an_ipv6_address_is_printed_in_brackets(served):
    result = call("--host", "::1", "--token", "t", "--json")
    assert json.loads(result.output) == {"dashboard_url": "http://[::1]:7421"}
