"""`collage-monitor doctor`: what it says of a good environment, and of each thing that is wrong."""

import json
import os
from email.utils import formatdate
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from click.testing import CliRunner
from collage_agent import doctor as machine
from collage_agent.command.doctor import doctor
from collage_agent.doctor import TRIED_LIBRARIES, delivery_checks, machine_checks
from collage_agent.transport.report_log import spool_path

from tests.launching.forked import bootstrap
from tests.ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def found(checks, name, status):
    return [check for check in checks if check.name == name and check.status == status]


@pytest.fixture
def answering(monkeypatch):
    """A server in memory; `status` and `clock` change what it says."""
    answers: dict[str, Any] = {"status": 200, "health": 200, "clock": None, "tokens": []}

    def answer(request):
        headers = {} if answers["clock"] is None else {"Date": formatdate(answers["clock"], usegmt=True)}
        if request.url.path == "/healthz":
            return httpx.Response(answers["health"], headers=headers)
        answers["tokens"].append(request.headers.get("Authorization"))
        return httpx.Response(answers["status"], json={})

    def client(**options):
        return original(transport=httpx.MockTransport(answer), **options)

    original = httpx.Client
    monkeypatch.setattr("httpx.Client", client)
    return answers


def environment(folder, **more):
    return {"COLLAGE_DIR": str(folder), **more}


def test_a_plain_machine_has_no_problem(tmp_path):
    checks = [*machine_checks({}), *delivery_checks(environment(tmp_path, COLLAGE_SERVER_URL=""))]
    assert [check for check in checks if check.status == "problem"] == []
    of_the_machine = {"python", "devices", "rounding", "ranks", "environment", "frameworks"}
    of_delivery = {"data folder", "token", "server", "waiting reports"}
    assert {check.name for check in checks} >= of_the_machine | of_delivery
    (frameworks,) = found(checks, "frameworks", "ok")
    for library in ("transformers", "lightning", "accelerate"):
        assert library in frameworks.text


def test_installed_optimizer_libraries_are_told_with_how_they_are_followed():
    told = {check.text.partition(" ")[0]: check.text for check in found(machine_checks({}), "optimizers", "ok")}
    assert told.keys() == {*TRIED_LIBRARIES, "any"}
    assert f"torch {torch.__version__.partition('+')[0]}" in told["torch"]
    assert "whole tensors in turns: Adafactor, Muon; only what changed, not what was lost: " in told["torch"]
    assert "turns" not in told["torchao"]


def test_a_library_that_is_not_installed_is_not_told(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", version)
    (only,) = machine.optimizer_checks()
    assert only.text.startswith("any other")


@pytest.mark.parametrize("library", TRIED_LIBRARIES)
def test_what_is_told_of_a_library_is_what_the_docs_say_was_tried(library):
    page = (ROOT / "docs" / "optimizers.md").read_text()
    tried = page.partition("\n## How weights are kept, and what is said of it\n")[0]
    kinds: dict[str, set[str]] = {}
    for line in tried.splitlines():
        if line.startswith(f"| {library} |"):
            _, name, _, kind, _ = (cell.strip() for cell in line.strip("|").split("|"))
            kinds.setdefault(kind, set()).add(name.partition(",")[0])
    assert set(TRIED_LIBRARIES[library].whole_tensor) == kinds.pop("whole-tensor", set())
    assert set(TRIED_LIBRARIES[library].whole_optimizer) == kinds.pop("whole-optimizer", set())
    assert set(TRIED_LIBRARIES[library].before_after) == kinds.pop("before-after", set())
    assert list(kinds) == [TRIED_LIBRARIES[library].usually]


OFFLINE = {"COLLAGE_MODE": "offline", "COLLAGE_SERVER_URL": "http://x"}


@pytest.mark.parametrize(
    ("variables", "name", "status", "told"),
    [
        ({"COLLAGE_SEVER_URL": "http://x"}, "environment", "problem", "COLLAGE_SEVER_URL is not a variable"),
        ({"COLLAGE_EVERY": "often"}, "environment", "problem", "COLLAGE_EVERY ignored"),
        ({"COLLAGE_MODE": "sometimes"}, "environment", "problem", "COLLAGE_MODE ignored"),
        ({"COLLAGE_ATTACH": "1", "PYTHONPATH": "/mine"}, "environment", "problem", "nothing will be watched"),
        ({"COLLAGE_MODE": "disabled"}, "environment", "note", ""),
        (OFFLINE, "environment", "note", "wins over"),
        ({"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, "ranks", "ok", "rank 1 of 4 (torchrun)"),
        ({"RANK": "1"}, "ranks", "problem", "WORLD_SIZE is not"),
        ({"COLLAGE_TOKEN": "very-secret"}, "environment", "ok", "COLLAGE_TOKEN=(hidden)"),
    ],
)
def test_what_the_environment_says_is_told_without_secrets(variables, name, status, told):
    checks = list(machine_checks(variables))
    assert any(told in check.text for check in found(checks, name, status))
    assert all("very-secret" not in check.text + check.action for check in checks)


def test_the_launchers_own_environment_is_fine():
    variables = {"COLLAGE_ATTACH": "1", "PYTHONPATH": f"/mine{os.pathsep}{bootstrap()}"}
    assert found(machine_checks(variables), "environment", "problem") == []


def test_an_absent_server_is_a_problem_only_where_one_was_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    checks = list(delivery_checks(environment(tmp_path, COLLAGE_SERVER_URL=url)))
    assert url in found(checks, "server", "problem")[0].text
    assert found(delivery_checks(environment(tmp_path, COLLAGE_SERVER_URL="no address")), "server", "problem")


def test_a_server_that_answers_is_well(tmp_path, answering):
    checks = list(delivery_checks(environment(tmp_path, COLLAGE_TOKEN="t")))
    assert found(checks, "server", "ok")
    assert answering["tokens"] == ["Bearer t"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"status": 401}, "asks for a token"),
        ({"status": 403}, "asks for a token"),
        ({"status": 404}, "is it a Collage Monitor server?"),
        ({"health": 503}, "503 to /healthz"),
    ],
)
def test_a_server_that_refuses_is_a_problem(tmp_path, answering, changes, told):
    answering.update(changes)
    assert told in found(delivery_checks(environment(tmp_path)), "server", "problem")[0].text


def test_a_local_token_never_goes_to_another_machine(tmp_path, answering):
    (tmp_path / "token").write_text("local")
    (tmp_path / "token").chmod(0o600)
    list(delivery_checks(environment(tmp_path, COLLAGE_SERVER_URL="https://collage.example")))
    list(delivery_checks(environment(tmp_path)))
    assert answering["tokens"] == [None, "Bearer local"]


@pytest.mark.parametrize(("offset", "status"), [(0, "ok"), (-3600, "note"), (3600, "note")])
def test_a_clock_that_is_off_is_noted(tmp_path, answering, monkeypatch, offset, status):
    answering["clock"] = 1_800_000_000 + offset
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    assert found(delivery_checks(environment(tmp_path)), "clock", status)


def test_a_readable_token_and_a_folder_that_is_none_are_problems(tmp_path):
    (tmp_path / "token").write_text("t")
    (tmp_path / "token").chmod(0o644)
    assert "chmod 600" in found(delivery_checks(environment(tmp_path)), "token", "problem")[0].action
    file = tmp_path / "token"
    assert found(delivery_checks(environment(file / "data")), "data folder", "problem")


def test_the_status_follows_the_problems(tmp_path, answering, monkeypatch):
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path))
    well = CliRunner().invoke(doctor, [])
    assert well.exit_code == 0, well.output
    assert well.output.endswith("ready to train\n")
    monkeypatch.setenv("COLLAGE_EVRY", "3")
    ill = CliRunner().invoke(doctor, ["--json"])
    assert ill.exit_code == 1
    answer = json.loads(ill.output)
    assert answer["problems"] == 1
    assert [check["name"] for check in answer["checks"] if check["status"] == "problem"] == ["environment"]


def test_doctor_counts_the_reports_that_wait_in_the_folder_that_it_is_given(tmp_path):
    spool = spool_path(tmp_path / "elsewhere", "run", "stream")
    spool.parent.mkdir(parents=True)
    spool.write_bytes(bytes(2**20))
    told = CliRunner().invoke(doctor, ["--dir", str(tmp_path / "elsewhere"), "--json"])
    checks = {check["name"]: check for check in json.loads(told.output)["checks"]}
    assert checks["waiting reports"]["status"] == "note"
    assert "1 files, 1.0 MiB" in checks["waiting reports"]["text"]
    assert str(tmp_path / "elsewhere") in checks["data folder"]["text"]
