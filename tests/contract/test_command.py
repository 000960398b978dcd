"""The command: verbs from entry points, absent components, and answers of `list` and `show`."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

import click
import httpx
import pytest
from click.testing import CliRunner

from collage_monitor import command
from collage_monitor.client import Client
from collage_monitor.command import root, show
from collage_monitor.errors import NotAuthorised, ServerUnreachable
from tests.contract.test_client import RUN

pytestmark = pytest.mark.slow

LATEST = {
    "run_id": "r",
    "step": 10,
    "time": 1.0,
    "model": {"edq_ratio": 0.84, "state_decrement_ratio/exp_avg_sq": None, "edq_ratio_low": 0.8},
    "scalars": {"loss": {"step": 12, "value": "NaN"}},
    "worst": [],
}
NOTHING: dict = {
    "run_id": "r",
    "metric": "edq_ratio",
    "layer": None,
    "axis": "step",
    "layers": [],
    **{key: [] for key in ("first_steps", "steps", "positions", "values", "minimum", "maximum")},
}
WORST = [{"layer": "h.3.weight", "metric": "edq_ratio", "value": 0.1}]


def answer(request):
    path = request.url.path
    if path.endswith("/worst"):
        return httpx.Response(200, json=WORST)
    if path.endswith("/latest"):
        return httpx.Response(200, json=LATEST)
    if path.endswith("/streams"):
        return httpx.Response(200, json={"run_id": "r", "streams": []})
    if path.endswith(("/heatmap", "/series")):
        return httpx.Response(200, json=NOTHING)
    if "/runs/" in path:
        return httpx.Response(200, json=RUN)
    return httpx.Response(200, json={"runs": [RUN], "cursor": None})


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """The verbs' client answers from memory."""
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(show, "Client", lambda url, token: Client(url, token, transport=transport))


def test_every_verb_is_offered_with_its_help():
    result = CliRunner().invoke(root, ["--help"])
    assert result.exit_code == 0
    for verb in ("up", "list", "show", "serve", "dashboard", "demo"):
        assert f"  {verb} " in result.output


def test_an_absent_component_says_what_to_install(monkeypatch):
    entry = EntryPoint("demo", "collage_demo.no_such_module:demo", command.VERBS)
    monkeypatch.setattr(command, "_found", lambda: {"demo": entry})
    result = CliRunner().invoke(root, ["demo", "--anything", "5"])
    assert result.exit_code == 1
    assert "needs collage_demo.no_such_module" in result.output
    assert "collage-monitor[all]" in result.output


_REQUIRED = {
    "client": ["httpx"],
    "agent": ["httpx", "torch", "python-ulid", "safetensors"],
    "server": ["fastapi", "sqlalchemy", "uvicorn"],
}


@pytest.mark.parametrize(
    ("installed", "verb", "advice"),
    [
        ("client", "up", "collage-monitor[dashboard,server]"),
        ("client", "demo", "collage-monitor[agent,dashboard,server]"),
        ("agent", "up", "collage-monitor[dashboard,server]"),
        ("agent", "demo", "collage-monitor[dashboard,server]"),
    ],
)
def test_a_verb_without_its_components_says_what_to_install(monkeypatch, tmp_path, installed, verb, advice):
    """Nothing is started, no port is guessed at, and nobody is sent to an extra that pulls in torch for nothing."""

    def version_if_installed(name):
        if name.lower() not in _REQUIRED[installed]:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(command, "version", version_if_installed)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(root, [verb])
    assert result.exit_code == 1
    assert f"pip install '{advice}'" in result.output
    assert "uvicorn" in result.output
    assert "port" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_every_component_is_installed_here():
    for extra in ("client", "agent", "server", "dashboard", "studies"):
        command.require("verb", extra)


@pytest.mark.parametrize(
    ("verb", "blocked", "extra"),
    [("list", "httpx", "client"), ("serve", "fastapi", "server"), ("dashboard", "dash", "dashboard")],
)
def test_a_verb_whose_library_is_absent_names_the_smallest_extra(verb, blocked, extra):
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from collage_monitor.command import main\n"
        f"sys.argv = ['collage-monitor', {verb!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs {blocked}" in done.stderr
    assert f"pip install 'collage-monitor[{extra}]'" in done.stderr


@pytest.mark.parametrize(("token", "said"), [(None, "asks for a token"), ("wrong", "does not know this token")])
def test_a_token_is_asked_for_in_words_for_people(token, said):
    def refuse(request):
        error = {"code": "unauthorised", "message": "no token; send the header Authorization: Bearer TOKEN"}
        return httpx.Response(401, json={"error": error})

    with (
        Client("http://server:1", token, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(NotAuthorised, match=f"http://server:1 {said}: set COLLAGE_TOKEN") as caught,
    ):
        client.runs()
    assert "Bearer" not in str(caught.value)


def test_list_prints_a_run(offline):
    result = CliRunner().invoke(root, ["list"])
    assert result.exit_code == 0, result.output
    header, line = result.output.splitlines()
    assert header.split()[:3] == ["run_id", "name", "strategy"]
    assert line.split() == ["r", "n", "-", "running", "10", "0.5", "-", "-"]


def test_list_and_show_as_json(offline):
    assert json.loads(CliRunner().invoke(root, ["list", "--json"]).output)["runs"][0]["run_id"] == "r"
    assert json.loads(CliRunner().invoke(root, ["show", "r", "--json"]).output)["step"] == 10


def test_show_prints_undefined_as_a_dash_and_the_worst_layer(offline):
    result = CliRunner().invoke(root, ["show", "r"])
    assert result.exit_code == 0, result.output
    assert "h.3.weight 0.1" in result.output
    row = next(line for line in result.output.splitlines() if "state_decrement_ratio" in line)
    assert row.split()[1] == "-"


def test_our_errors_are_sentences(monkeypatch):
    @click.command("refuse")
    def refuse():
        raise ServerUnreachable("no answer from http://x")

    monkeypatch.setattr(command, "root", refuse)
    monkeypatch.setattr("sys.argv", ["collage-monitor"])
    with pytest.raises(SystemExit, match="collage-monitor: no answer"):
        command.main()


def test_help_does_without_torch():
    """It takes seconds to load."""
    code = "import sys; from collage_monitor.command import root; root(['--help'], standalone_mode=False); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
