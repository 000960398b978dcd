"""The verb `serve dashboard`: its options, its token, its refusals."""

import json
import socket

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
    seen = {}

    class Stopped:
        def run(self):
            seen["ran"] = True

    def create_server(application, **options):
        seen.update(options, application=application)
        return Stopped()

    class Listening:
        def getsockname(self):
            return "", 7421

        def close(self):
            """Nothing was opened."""

    monkeypatch.setattr("waitress.server.create_server", create_server)
    monkeypatch.setattr(command, "listening_sockets", lambda host, port: [Listening()])
    monkeypatch.setattr(
        command, "create_dashboard", lambda factory, **more: seen.update(more, factory=factory) or FakeDashboard()
    )
    return seen


class FakeDashboard:
    server = object()


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
    arguments = ["--server-url", "http://127.0.0.1:9", "--token-file", str(file), "--json"]
    result = CliRunner().invoke(command.dashboard, arguments, env={"COLLAGE_TOKEN": ""})
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"dashboard_url": "http://127.0.0.1:7421"}
    with served["factory"]() as client:
        assert client._http.headers["Authorization"] == "Bearer secret"
    assert served["ran"]


HERE = ("http://localhost:*", "http://127.0.0.1:*")
WIKI = "https://wiki.example.org"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--host", "127.0.0.1"], {"allowed_hosts": LOOPBACK_HOSTS, "embed_in": HERE}),
        (["--host", "0.0.0.0", "--allowed-host", "box.lan"], {"allowed_hosts": LOOPBACK_HOSTS | {"box.lan"}}),
        (["--sign-in"], {"embed_in": ()}),
        (["--sign-in", "--embed-in", WIKI], {"embed_in": (WIKI,)}),
        (
            ["--trusted-proxy", "10.0.0.1"],
            {"trusted_proxy": "10.0.0.1", "trusted_proxy_headers": {"x-forwarded-for", "x-forwarded-proto"}},
        ),
    ],
)
def test_names_frames_and_proxies_are_as_stated(served, arguments, expected):
    CliRunner().invoke(command.dashboard, ["--token", "t", *arguments])
    assert {name: served[name] for name in expected} == expected


def test_a_missing_token_file_is_an_error_that_names_it(tmp_path):
    missing = str(tmp_path / "none")
    result = CliRunner().invoke(command.dashboard, ["--token-file", missing], env={"COLLAGE_TOKEN": ""})
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


@pytest.mark.parametrize("given", ["wiki.example.org", "*", "https://a.org/b", "https://a.org; script-src *"])
def test_what_is_no_origin_is_refused(served, given):
    refused = CliRunner().invoke(command.dashboard, ["--token", "t", "--embed-in", given])
    assert refused.exit_code == 2
    assert repr(given) in refused.output
    assert served == {}


def test_beyond_loopback_names_must_be_stated(served):
    refused = CliRunner().invoke(command.dashboard, ["--host", "0.0.0.0", "--token", "t"])
    assert refused.exit_code == 2
    assert "--allowed-host" in refused.output
    assert served == {}


def test_beyond_loopback_nothing_is_open_without_a_sign_in(served):
    for arguments, asked in (
        (["--host", "0.0.0.0", "--allowed-host", "box.lan"], True),
        (["--sign-in"], True),
        (["--trusted-proxy", "127.0.0.1"], True),
        ([], False),
    ):
        result = CliRunner().invoke(
            command.dashboard, [*arguments, "--server-url", "http://127.0.0.1:9", "--token", "t"]
        )
        assert result.exit_code == 0, result.output
        assert (served["sign_in"] is not None) is asked
    with served["factory"]() as client:
        assert client._http.headers["Authorization"] == "Bearer t"


def resolve_to(monkeypatch, *addresses):
    """Every name has these addresses."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: [found for address in addresses for found in resolve(address, *more, **named)],
    )


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
    arguments = ["--host", "localhost", "--port", "0", "--token", "t", "--json"]
    result = CliRunner().invoke(command.dashboard, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first, second = ports
    assert first == second
    assert json.loads(result.output) == {"dashboard_url": f"http://localhost:{first}"}


def test_an_ipv6_address_is_printed_in_brackets(served):
    result = CliRunner().invoke(command.dashboard, ["--host", "::1", "--token", "t", "--json"])
    assert json.loads(result.output) == {"dashboard_url": "http://[::1]:7421"}
