"""docker-compose.yml and its files: what may be known of them without a container engine."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from collage_server.command.serve import serve
from collage_server.settings import Settings, settings_from_environment

from collage_monitor.alerts import ALERTS
from tests.forking import SERVER, run_command
from tests.system import is_content
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
ONCE = {"secrets", "tokens"}
SCRIPT = (ROOT / "server/deploy/secrets.sh").read_text()
DOCKERFILE = dict(re.findall(r"^(?:ARG )?(\w+)[ =](\S+)$", (ROOT / "Dockerfile").read_text(), re.M))
PAGE = (ROOT / "docs/team-server.md").read_text()
MADE_BY_HAND = re.findall(r"docker compose exec server collage-monitor (token create [^`]+)`", PAGE)
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}")


def user_of(name):
    """The number of the user that a service runs as; our image's stands in its Dockerfile."""
    return SERVICES[name].get("user", DOCKERFILE["USER"]).partition(":")[0]


def environment_of(name, told):
    """A service's variables where the file .env says this, as Compose makes them."""

    def value(text):
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: told.get(found[1]) or found[2], text)

    service = SERVICES[name]
    files = [told for file in service.get("env_file", ()) if file == {"path": ".env", "required": False}]
    return dict(*files, **{key: value(text) for key, text in service["environment"].items()})


def mounts(name):
    return dict(reversed(entry.removesuffix(":ro").rsplit(":", 1)) for entry in SERVICES[name].get("volumes", []))


def test_every_image_is_pinned_by_its_digest():
    images = [entry["image"] for entry in SERVICES.values() if "build" not in entry]
    images.append(DOCKERFILE["BASE_IMAGE"])
    assert [image for image in images if not PINNED.fullmatch(image)] == []


def test_every_setting_reaches_the_server(tmp_path):
    """Or the stack itself fixes it. A new setting needs nothing here."""
    command = serve.make_context("serve", [*SERVICES["server"]["command"][1:-2]])
    fixed = {name for name, given in command.params.items() if given} | {"token", "no_auth"}
    fixed |= {"database", "trusted_proxies"}
    names = {field.name for field in dataclasses.fields(Settings)} - fixed
    told = {f"COLLAGE_SERVER_{name.upper()}": f"a value of {name}" for name in names}
    assert environment_of("server", told).items() >= told.items()
    assert fixed == {"folder", "host", "port", "allowed_hosts", "token", "no_auth", "database", "trusted_proxies"}


@pytest.mark.parametrize("told", [{}, {"POSTGRES_PASSWORD": "hush", "COLLAGE_SERVER_ARCHIVE": "s3://team/runs"}])
def test_the_server_starts_with_what_it_is_told_and_can_archive(told):
    found = environment_of("server", told)
    assert not [name for name, value in found.items() if value in {"", None}]
    settings = settings_from_environment(found, folder=Path("/data"), token="a-token-of-many-bits-0123456789")
    assert settings.database
    assert settings.trusted_proxies == ("172.30.74.2",)
    address = told.get("COLLAGE_SERVER_ARCHIVE", "/data/archive")
    assert settings.archive_address == address
    assert mounts("server")["/data"] == "server-data"


def test_the_image_can_do_whatever_a_setting_asks_for():
    """`archive`: COLLAGE_SERVER_ARCHIVE_PUBLISH needs deltalake."""
    (wanted,) = re.findall(r"--constraint constraints\.txt (.*) \\$", (ROOT / "Dockerfile").read_text(), re.M)
    assert wanted.split() == [".", '"./server[archive]"']


@pytest.mark.parametrize("arguments", MADE_BY_HAND)
def test_the_page_s_commands_make_tokens(arguments, tmp_path):
    done = run_command(SERVER, *arguments.split(), "--dir", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("own", ["127.0.0.11", "172.30.74.1"])
def test_the_proxy_asks_the_engine_s_own_resolver(own, tmp_path):
    """Docker's and Podman's differ. The first counts: a second one may be the host's, which knows no service.

    The file lies where only root and the container can write: everybody can write to a host's /tmp.
    """
    told = ("search example", "nameserver 2001:db8::1", f"nameserver {own}", "nameserver 192.0.2.53", "")
    (tmp_path / "resolv.conf").write_text("\n".join(told))
    script = SERVICES["proxy"]["command"][-1].replace("exec nginx", "true")
    for shipped, here in {"/etc/": f"{tmp_path}/", "/run/collage/": f"{tmp_path}/"}.items():
        script = script.replace(shipped, here)
    subprocess.run(["sh", "-c", script], check=True, timeout=PATIENCE_SECONDS)
    assert (tmp_path / "resolver.conf").read_text() == f"resolver {own} valid=10s;\n"
    assert "include /run/collage/resolver*.conf;" in (ROOT / "server/deploy/nginx.conf").read_text()


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - ONCE))
def test_a_service_is_not_root_and_says_whether_it_is_well(name):
    service = SERVICES[name]
    assert user_of(name) != "0"
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - ONCE))
def test_a_service_reads_its_own_secrets_alone_and_they_are_its_user_s(name):
    folders = {target for target in mounts(name) if target.startswith("/secrets/")}
    assert all(f":{folder}:ro" in " ".join(SERVICES[name]["volumes"]) for folder in folders)
    owners = dict(reversed(pair) for pair in re.findall(r"^ +own (\d+) (\w+)$", SCRIPT, re.M))
    owners |= dict(re.findall(r"^ +token (\w+) (\d+) \w+$", SCRIPT, re.M))
    assert {owners[folder.removeprefix("/secrets/")] for folder in folders} <= {user_of(name)}
    extra = {"server": {"agents", "people"}, "proxy": {"certificate"}}.get(name, set())
    assert {folder.removeprefix("/secrets/") for folder in folders} <= {name, *extra}


def test_tokens_have_the_least_role_that_does():
    assert dict(re.findall(r"^ +token (\w+) \d+ (\w+)$", SCRIPT, re.M)) == {
        "agents": "ingest",
        "dashboard": "read",
        "prometheus": "read",
        "alertmanager": "ingest",
    }


def test_only_the_proxy_listens_beyond_this_machine_and_only_when_told():
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            is_open = name == "proxy" and not port.endswith(":7422")
            assert port.startswith("${COLLAGE_ADDRESS:-127.0.0.1}:" if is_open else "127.0.0.1:"), port


def test_every_service_has_a_bound_of_memory():
    assert {name for name, service in SERVICES.items() if "mem_limit" not in service} == ONCE


def test_the_network_is_named_once_and_can_be_another():
    text = (ROOT / "docker-compose.yml").read_text()
    assert text.count("172.30.74") == text.count("${COLLAGE_NETWORK:-172.30.74}") == 5


def test_server_and_dashboard_believe_the_proxy_s_address_and_no_other():
    address = SERVICES["proxy"]["networks"]["services"]["ipv4_address"]
    assert SERVICES["server"]["environment"]["COLLAGE_SERVER_TRUSTED_PROXIES"] == address
    command = SERVICES["dashboard"]["command"]
    assert command[command.index("--trusted-proxy") + 1] == address


def test_what_is_mounted_from_here_is_here():
    """By what runs as root alone: services run as users who may not read this checkout. They read copies."""
    paths = {source: name for name in SERVICES for source in mounts(name).values() if source.startswith("./")}
    assert len(paths) == 2
    assert [path for path in paths if not (ROOT / path).is_dir()] == []
    assert set(paths.values()) <= ONCE
    placed = dict(re.findall(r"^ +place (\S+) (\S+)$", SCRIPT, re.M))
    assert [path for path in placed if not (ROOT / "server" / path).is_file()] == []
    read = {
        source.removesuffix("-configuration")
        for name in SERVICES.keys() - ONCE
        for source in mounts(name).values()
        if source.endswith("-configuration")
    }
    assert read == {target.partition("/")[0] for target in placed.values()}


@pytest.mark.prometheus
def test_amtool_is_content_and_prometheus_finds_it():
    is_content("amtool", "check-config", ROOT / "server/prometheus/alertmanager.yml")
    told = yaml.safe_load((ROOT / "server/prometheus/prometheus.yml").read_text())
    assert told["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["alertmanager:9093"]


@pytest.mark.prometheus
def test_every_query_of_grafana_s_dashboard_asks_for_what_is_exported(tmp_path):
    """promtool reads each as a rule; each name is one of /metrics or of the recording rules."""
    rules = [{"record": f"asked:{place}", "expr": query} for place, query in enumerate(grafana_queries())]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))
    is_content("promtool", "check", "rules", tmp_path / "asked.yml")
    page = (ROOT / "tests/server/exposition.txt").read_text()
    exported = set(re.findall(r"^# TYPE (\S+) ", page, re.M)) | {"collage_server_commit_seconds_bucket"}
    exported |= set(re.findall(r"record: (\S+)", (ROOT / "server/prometheus/collage.rules.yml").read_text()))
    assert {name for query in grafana_queries() for name in names_of(query)} <= exported


def test_the_worst_layer_is_named_in_grafana_with_no_more_series():
    board = json.loads((ROOT / "server/deploy/grafana/dashboard.json").read_text())
    [panel] = [panel for panel in board["panels"] if panel["title"] == "EDQ of the worst layer"]
    assert panel["targets"][0]["legendFormat"] == "{{run}}: {{layer}}"
    page = (ROOT / "tests/server/exposition.txt").read_text()
    named = re.findall(r'^collage_worst_layer_edq_ratio\{(layer="[^"]+",)?.*worst="(\d)"\}', page, re.M)
    assert named == [('layer="blocks.1.weight",', "1"), ("", "2"), ("", "3")]


def test_grafana_draws_the_alerts_bounds_and_each_series_leads_to_its_run():
    board = json.loads((ROOT / "server/deploy/grafana/dashboard.json").read_text())
    bounds: dict[str, set[float]] = {}
    for alert in ALERTS.values():
        for own in alert.drawn:
            if own.measure in {"value", "age"} and "nonfinite" not in own.series:
                bounds.setdefault(own.series.partition("/")[0], set()).add(own.threshold)
    drawn = 0
    for panel in board["panels"]:
        [query, *_] = [target["expr"] for target in panel.get("targets", [])] or [""]
        defaults = panel["fieldConfig"]["defaults"] if query else {}
        known = set.union(*(bounds.get(name, set()) for name in names_of(query))) if names_of(query) else set()
        steps = [step["value"] for step in defaults.get("thresholds", {}).get("steps", ()) if step["value"]]
        assert set(steps) <= known, panel["title"]
        assert bool(steps) == bool(known), panel["title"]
        drawn += bool(steps)
        if panel["type"] == "timeseries" and "$run" in query:
            [link] = defaults["links"]
            assert link["url"] == "${dashboard}/run/${__field.labels.run_id}", panel["title"]
    assert drawn == 6
    assert [entry["name"] for entry in board["annotations"]["list"]] == ["Alerts", "Resumes"]
    [address] = [entry["query"] for entry in board["templating"]["list"] if entry["name"] == "dashboard"]
    assert address == "https://localhost:7421", "where the compose file has it"


def grafana_queries():
    """The dashboard's queries, every project and run chosen."""
    board = json.loads((ROOT / "server/deploy/grafana/dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [entry["expr"] for entry in board["annotations"]["list"]]
    queries = [entry["definition"] for entry in board["templating"]["list"] if entry["type"] == "query"]
    chosen = [re.sub(r"^label_values\((.+), \w+\)$", r"\1", query) for query in queries]
    return [re.sub(r"\$(project|run)\b", ".*", query) for query in [*asked, *chosen]]


def names_of(query):
    """The metrics that a query asks for."""
    return set(re.findall(r"\bcollage[_:][a-z_]+", query))
