"""A real bf16 training goes wrong twice, and a person sees both in a real browser; the log says how soon.

First its EDQ falls: a real Prometheus scrapes the server, its rule fires, and a real Alertmanager tells the server.
Then a weight is NaN: the server's own evaluation finds that and tells a webhook. Scrapes and rules come twice a
second, the server's evaluation every second. The rules' waits are a 300th of the shipped ones: a fall of EDQ must
last 5 minutes, so no interval shows it within one. The server's own evaluation has the waits that are shipped.
"""

import logging
import time

import collage_agent as collage
import httpx
import pytest
import torch
from collage_server.alert_documents import rules

from collage_monitor.alerts import ALERTS
from collage_monitor.client import Client
from collage_monitor.local import ensure_token, read_token, token_path
from tests.alerts.receivers import web_server
from tests.deploy.test_compose import grafana_queries, names_of
from tests.ports import command, free_port, running
from tests.system import require
from tests.waiting import until

pytestmark = pytest.mark.slow

TIME_SCALE = 1 / 300
CONFIGURATION = """
global: {{ scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms }}
rule_files: ["{rules}"]
alerting: {{ alertmanagers: [{{ static_configs: [{{ targets: ["127.0.0.1:{alertmanager_port}"] }}] }}] }}
scrape_configs:
  - job_name: collage
    authorization: {{ credentials_file: "{token}" }}
    static_configs: [{{ targets: ["127.0.0.1:{port}"] }}]
"""
ALERTMANAGER = """
route:
  receiver: nobody
  routes: [{{ receiver: collage, matchers: [alertname = CollageEdqDrop] }}]
  group_by: [alertname, run_id]
  group_wait: 0s
  group_interval: 1s
receivers:
  - name: nobody
  - name: collage
    webhook_configs:
      - url: http://127.0.0.1:{port}/api/v1/alerts/alertmanager
        http_config: {{ authorization: {{ credentials_file: "{token}" }} }}
"""


class Prometheus:
    """The questions that the test asks."""

    def __init__(self, http):
        self._http = http

    def query(self, expression):
        result = self._http.get("/query", params={"query": expression}).json()["data"]["result"]
        return [float(entry["value"][1]) for entry in result]

    def scraped(self, expression):
        """The same once a scrape brought it: after one that came too late all series are gone until the next."""
        return until(lambda: self.query(expression), f"an answer to {expression}")

    def names(self):
        return set(self._http.get("/label/__name__/values").json()["data"])

    def firing(self):
        alerts = self._http.get("/alerts").json()["data"]["alerts"]
        return {entry["labels"]["alertname"]: entry for entry in alerts if entry["state"] == "firing"}


@pytest.fixture
def webhook(monkeypatch):
    """What the server's webhook receives."""
    with web_server() as (hook, requests):
        monkeypatch.setenv("COLLAGE_SERVER_ALERT_WEBHOOK", f"{hook}/alerts")
        monkeypatch.setenv("COLLAGE_SERVER_ALERT_INTERVAL_SECONDS", "1")
        yield requests


def received(requests):
    """What fires, by alert."""
    told = [body["incident"] for _, _, body in requests]
    return {incident["alert"]: incident for incident in told if incident["state"] == "firing"}


@pytest.fixture
def services(tmp_path, webhook):
    """(server address, Prometheus): both running beside an Alertmanager, the rules' hours shortened to seconds."""
    prometheus, alertmanager = require("prometheus"), require("prometheus-alertmanager")
    port, scraper_port, alertmanager_port = free_port(), free_port(), free_port()
    ensure_token(tmp_path)
    (tmp_path / "rules.yml").write_text(rules(TIME_SCALE))
    (tmp_path / "prometheus.yml").write_text(
        CONFIGURATION.format(
            rules=tmp_path / "rules.yml",
            token=token_path(tmp_path),
            port=port,
            alertmanager_port=alertmanager_port,
        )
    )
    (tmp_path / "alertmanager.yml").write_text(ALERTMANAGER.format(token=token_path(tmp_path), port=port))
    server = command("serve", "--dir", tmp_path, "--port", port, "--token-file", token_path(tmp_path))
    scraper = [
        prometheus,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{scraper_port}",
    ]
    receiver = [
        alertmanager,
        f"--config.file={tmp_path / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{alertmanager_port}",
        "--cluster.listen-address=",
    ]
    address, scraper_address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{scraper_port}"
    with (
        running(server, f"{address}/healthz", tmp_path / "server.log"),
        running(receiver, f"http://127.0.0.1:{alertmanager_port}/-/ready", tmp_path / "alertmanager.log"),
        running(scraper, f"{scraper_address}/-/ready", tmp_path / "prometheus.log"),
        httpx.Client(base_url=f"{scraper_address}/api/v1", trust_env=False) as http,
    ):
        yield address, Prometheus(http)


class Screen:
    """The list of incidents in a browser, open before anything fires."""

    def __init__(self, page, url):
        self._page, self._url = page, url
        page.goto(f"{url}/incidents")
        page.get_by_text("No alert has fired here.").wait_for()

    def shows(self, alert):
        return self._page.get_by_role("link", name=alert, exact=True).count() > 0

    def open(self, alert, text):
        """The incident's page, as a person comes there from the list, and back to the list."""
        self._page.get_by_role("link", name=alert, exact=True).first.click()
        self._page.get_by_role("heading", level=1, name=ALERTS[alert].summary).wait_for()
        self._page.get_by_role("region", name="Timeline").get_by_text(text).first.wait_for()
        seen_at = time.monotonic()
        self._page.goto(f"{self._url}/incidents")
        return seen_at

    def close(self):
        self._page.goto("about:blank")


@pytest.fixture
def screen(services, open_page, dashboard, tmp_path):
    with dashboard(services[0], token_path(tmp_path), tmp_path) as url:
        opened = Screen(open_page(url).page, url)
        yield opened
        opened.close()


@pytest.mark.nightly
@pytest.mark.prometheus
@pytest.mark.browser
def test_what_goes_wrong_is_seen_in_the_browser(services, screen, webhook, tmp_path):
    address, prometheus = services
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(32, 64).bfloat16()

    def train_until(condition, what, steps=10):
        """Between two looks it takes so many steps, a measured one among them: it need not keep a core busy."""

        def trained():
            for _ in range(steps):
                loss = (model(inputs) - torch.randn(32, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return condition()

        until(trained, what)

    with collage.init("alerts", "falling", server_url=address, dir=tmp_path) as run:
        collage.watch(model, optimizer, strategy="plain", every=10, budget=None)
        warm_up = ALERTS["CollageEdqDrop"].warm_up_steps
        train_until(
            lambda: prometheus.query(f"count_over_time((collage_step > {warm_up})[1m:500ms])") > [8.0],
            "the run is scraped beyond its warm-up",
            steps=50,
        )
        before = prometheus.scraped("collage_edq_ratio")
        assert before > [0.95]
        assert "CollageEdqDrop" not in prometheus.firing()
        # Grafana's dashboard finds something wherever the server exports what it asks for.
        known = prometheus.names()
        exported = [query for query in grafana_queries() if names_of(query) <= known]
        assert len(exported) > 12
        for query in filter(names_of, exported):
            prometheus.scraped(query)
        # Updates of a thousandth of the size stand below half a gap of most weights: they are rounded away.
        optimizer.param_groups[0]["lr"] = 1e-5
        began = time.monotonic()
        train_until(lambda: screen.shows("CollageEdqDrop"), "the list of incidents shows CollageEdqDrop")
        scraped_seconds = screen.open("CollageEdqDrop", "CollageEdqDrop firing") - began
        assert prometheus.scraped("collage_edq_ratio") < [0.9 * before[0]]
        with Client(address, read_token(tmp_path)) as client:
            told = client.incidents(run_id=run.run_id, alert="CollageEdqDrop").events[0]
            kinds = [event.kind for event in client.events(run.run_id).events]
            with torch.no_grad():
                next(model.parameters())[0, 3] = float("nan")
            began = time.monotonic()
            train_until(lambda: screen.shows("CollageNotFinite"), "the list of incidents shows CollageNotFinite")
            own_seconds = screen.open("CollageNotFinite", "CollageNotFinite firing") - began
            sent = until(lambda: received(webhook).get("CollageNotFinite"), "the webhook is told")
            own = {one.alert: one for one in client.firing(run.run_id)}["CollageNotFinite"]
    logging.info("seen %.1f s after EDQ fell, %.1f s after a weight was NaN", scraped_seconds, own_seconds)
    assert own.source == "server"
    assert sent["incident_id"] == own.incident_id
    assert (told.source, told.project) == ("alertmanager", "alerts")
    assert "alert" in kinds
    labels = [told.labels[name] for name in ("project", "run_id", "run", "strategy")]
    assert labels == ["alerts", run.run_id, "falling", "plain"]
