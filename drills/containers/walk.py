"""What a team does with the shipped stack, from its start to its end, and what must not be lost."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml
from playwright.sync_api import sync_playwright

from collage_monitor.client import Client
from collage_monitor.errors import CollageError
from drills.containers.engine import ROOT
from drills.containers.stack import ADDRESS, NAME, SERVICES, TAKEN, TOLD, Stack
from drills.containers.training import PROJECT, RUN
from tests.browser.conftest import CHROMIUM_FLAGS
from tests.system import find_chromium
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["walk"]

_ALERT = "CollageExpectationBroken"
_PROMETHEUS, _ALERTMANAGER = "http://127.0.0.1:9090", "http://127.0.0.1:9093"
_MEBIBYTES = {"m": 1, "g": 1024}
_MEMORY_LIMIT = "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"


def walk(engine, say):
    """Says each sentence once it has been seen; raises AssertionError or RuntimeError at the first that fails."""
    _stand_as_monitor()
    stack = Stack(engine)
    with pytest.MonkeyPatch.context() as environment, stack.alone():
        stack.take_the_default_range()
        stack.up()
        say(f"started, and healthy, beside a network of {TAKEN}")
        assert {name: stack.ask("server", "printenv", name).strip() for name in TOLD} == TOLD
        say("settings of the file .env reach the server")
        _check_memory(stack)
        say("each service has its limit of memory; what takes more is killed, and the server serves on")
        environment.setenv("SSL_CERT_FILE", str(stack.certificate))
        with Client(stack.url, stack.make_reader()) as client:
            _use(stack, client, say)


def _use(stack, client, say):
    stack.train()
    run = until(lambda: next(iter(client.runs(project=PROJECT).runs), None), "the run").run_id
    _reach(client, run, 1)
    say("a training in a container of that network reports over TLS, with the agents' token")
    _look(run, stack.make_reader())
    say("its run is on the dashboard, over TLS, after a sign-in")
    _check_alert(client, run)
    say(f"{_ALERT}: at Alertmanager, which told the server, and among the server's incidents")
    for service in SERVICES:
        reached = client.latest(run).step
        stack.restart(service)
        _reach(client, run, reached + 1)
        say(f"{service} restarted: healthy, and new reports come")
    _check_down_and_up(stack, client, run)
    say("down and up again: token, incidents, Prometheus' samples and Alertmanager's silence are there")
    steps = stack.stop_training()
    _reach(client, run, steps)
    seen = client.series(run, "edq_ratio", points=10_000).steps
    assert seen == list(range(1, steps + 1)), f"{steps - len(seen)} of {steps} steps are missing"
    assert client.run(run).state == "finished"
    say(f"{steps} steps trained, {len(seen)} on the server: nothing lost")


def _stand_as_monitor():
    """This network namespace has the address, and a name for it, of a machine that a team reaches."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    hosts = Path("/run/hosts")
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {NAME}\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


def _check_memory(stack):
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in SERVICES:
        limit = services[name]["mem_limit"]
        found = int(stack.ask(name, "sh", "-c", _MEMORY_LIMIT)) // 2**20
        assert found == int(limit[:-1]) * _MEBIBYTES[limit[-1]], f"{name} may take {found} MiB, not {limit}"
    with pytest.raises(RuntimeError, match="ended with 137"):
        stack.ask("server", "python3", "-c", "b'x' * 2**31")
    stack.wait_for("server")


def _reach(client, run, step):
    """Wait until a step of the run is on the server; the proxy may not find at once what has just come back."""

    def is_there():
        try:
            return (client.latest(run).step or 0) >= step
        except CollageError:
            return False

    until(is_there, f"step {step}")


def _look(run, token):
    """The run's page in a browser, after the sign-in with a token."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(CHROMIUM_FLAGS))
        # Chromium trusts the system's certificates alone; the other clients here verify this one.
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        page.goto(f"https://{NAME}:7421/run/{run}")
        page.get_by_label("Token").fill(token)
        page.keyboard.press("Enter")
        page.get_by_text(RUN).first.wait_for()
        page.locator(".answer", has_text="of its updates").wait_for()
        browser.close()


def _check_alert(client, run):
    """It is due at once, and within a minute scraped, evaluated, grouped and sent on."""
    until(lambda: (_ALERT, run) in _firing(), "the alert at Alertmanager")
    until(lambda: _sent("notifications_total") >= 1, "a message to the server")
    assert _sent("notifications_failed_total") == 0
    assert _ALERT in {incident.alert for incident in client.incidents(run_id=run).events}


def _answer(address, **query):
    return httpx.get(address, params=query, trust_env=False, timeout=PATIENCE_SECONDS).raise_for_status()


def _firing():
    """(alert, run) of all that Alertmanager knows."""
    labels = [alert["labels"] for alert in _answer(f"{_ALERTMANAGER}/api/v2/alerts").json()]
    return {(label["alertname"], label.get("run_id")) for label in labels}


def _sent(metric):
    """A count of Alertmanager's messages to the server."""
    lines = _answer(f"{_ALERTMANAGER}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f'alertmanager_{metric}{{integration="webhook"')]
    return sum(float(line.split()[-1]) for line in found)


def _check_down_and_up(stack, client, run):
    now = time.time()
    begins, ends = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for at in (now, now + 3600))
    silence = {"matchers": [{"name": "run_id", "value": "none", "isRegex": False}], "createdBy": "ada"}
    silence |= {"comment": "kept", "startsAt": begins, "endsAt": ends}
    httpx.post(f"{_ALERTMANAGER}/api/v2/silences", json=silence, trust_env=False).raise_for_status()
    before = _kept(stack, client, run, now)
    assert {kind for kind, _ in before} == {"sample", "silence", "incident", "token"}
    stack.down()
    assert stack.containers() == ["training"]
    stack.up()
    _reach(client, run, 1)
    assert before <= _kept(stack, client, run, now)


def _kept(stack, client, run, time_then):
    """What a team would miss, as (kind, value); the sample is Prometheus' newest at a time."""
    query = f'collage_step{{run_id="{run}"}}'
    samples = _answer(f"{_PROMETHEUS}/api/v1/query", query=query, time=time_then).json()["data"]["result"]
    silences = _answer(f"{_ALERTMANAGER}/api/v2/silences").json()
    return {
        *(("sample", sample["value"][1]) for sample in samples),
        *(("silence", silence["id"]) for silence in silences),
        *(("incident", incident.incident_id) for incident in client.incidents(run_id=run).events),
        ("token", stack.agents_token()),
    }
