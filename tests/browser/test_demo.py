"""The whole demo in small: services up, five trainings watched over HTTP, a summary, and an alert that fires."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.demo.test_summary import NAMES
from tests.forking import SERVICES, run_forked
from tests.launching.forked import forked_python
from tests.ports import command, free_port, interruptible
from tests.system import chromium
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

STEPS = 10
"""Two measured ones, the first and the last."""
BYTES = {"plain": 8, "light": 10, "plus": 12, "master-weights": 16}


def arguments_for(folder, steps):
    ports = ["--port", free_port(), "--dashboard-port", free_port()]
    return command("demo", "--exit", "--output", folder, "--steps", steps, *ports)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(process, its summary, the folder of its data) of a demo that ended by itself. What it starts is forked."""
    folder = tmp_path_factory.mktemp("demo")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLAGE_")}
    with forked_python() as python:
        _, run, code, *arguments = arguments_for(folder, STEPS)
        code = f"import sys; sys.executable = {python!r}; {code}"
        process = run_forked(SERVICES, run, code, *arguments, environment=environment, folder=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return process, json.loads((folder / "summary.json").read_text()), folder / "data"


@pytest.fixture(scope="module")
def server_url(finished, served):
    """The address of a server over the folder that the demo has left."""
    chromium()
    with served(finished[2]) as found:
        yield found


def test_five_lines_with_every_number_measured_and_every_report_stored_once(finished):
    process, lines, _ = finished
    assert f"step {STEPS}/{STEPS}" in process.stdout
    told = [(line["strategy"], line["dtype"]) for line in lines]
    assert told == [("plain", "float32"), *((name, "bfloat16") for name in BYTES)]
    for line in lines:
        assert set(line) >= NAMES
        assert line["steps"] == STEPS
        assert None not in line.values(), line
        assert line["reports_sent"] == line["reports_stored"] >= STEPS
        size = 16 if line["dtype"] == "float32" else BYTES[line["strategy"]]
        assert line["bytes_per_parameter"] == pytest.approx(size, rel=0.02)
        assert line["run_id"] in process.stdout
    edq = {(line["strategy"], line["dtype"]): line["edq_ratio"] for line in lines}
    assert edq["plain", "bfloat16"] < 0.95 < edq["plus", "bfloat16"]


@pytest.mark.browser
def test_a_resume_that_lost_its_residuals_has_made_an_alert_fire(finished, client, goto):
    incident, *_ = client.incidents().events
    assert (incident.alert, incident.source) == ("CollageResidualsOff", "server")
    assert f"/incident/{incident.incident_id}" in finished[0].stdout
    page = goto(f"/incident/{incident.incident_id}")
    page.get_by_role("region", name="Timeline").get_by_text("Resumed").wait_for()
    assert incident.run_id not in {line["run_id"] for line in finished[1]}


def processes_about(folder):
    """Command lines of the processes that name `folder`."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if str(folder) in line]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc on this system to look for processes")
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    asked: dict = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "preexec_fn": interruptible}
    with subprocess.Popen(arguments_for(tmp_path, 100_000), cwd=tmp_path, **asked) as process:
        until(lambda: sum("worker" in line for line in processes_about(tmp_path)) == 2, "two trainings run")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) != 0
    until(lambda: not processes_about(tmp_path), "everything has ended")
