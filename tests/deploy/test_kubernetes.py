"""server/deploy/kubernetes: valid by the schemas of Kubernetes, and right about what runs inside."""

from itertools import takewhile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from collage_dashboard.command import dashboard
from collage_server.command.migrate import migrate
from collage_server.command.serve import serve
from collage_server.settings import FIXED_LIMITS, settings_from_environment

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "server/deploy/kubernetes").glob("*.yaml"))
OBJECTS = [document for file in FILES for document in yaml.safe_load_all(file.read_text())]
TEMPLATES = {
    found["metadata"]["name"]: found["spec"]["template"]
    for found in OBJECTS
    if found["kind"] in {"Deployment", "Job"}
}
COMMANDS = {("serve",): serve, ("serve", "dashboard"): dashboard, ("setup", "database"): migrate}
OLDEST, NEWEST = "1.29", "1.36"


def name_of(found):
    return f"{found['kind']}/{found['metadata']['name']}"


def containers():
    return [container for template in TEMPLATES.values() for container in template["spec"]["containers"]]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("found", OBJECTS, ids=name_of)
def test_each_object_is_valid(found, version):
    kubernetes_validate.validate(found, version, strict=True)


def test_what_is_not_valid_is_found():
    wrong = {**OBJECTS[0], "spec": {**OBJECTS[0]["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_the_commands_take_their_arguments(monkeypatch):
    monkeypatch.setenv("COLLAGE_SERVER_DATABASE", "postgresql://collage@database/collage")
    for container in containers():
        verb = tuple(takewhile(lambda word: not word.startswith("-"), container["args"]))
        COMMANDS[verb].make_context(" ".join(verb), container["args"][len(verb) :]).close()


def test_the_server_takes_its_settings(monkeypatch, tmp_path):
    (server,) = (entry for entry in containers() if entry["name"] == "server")
    for entry in server["env"]:
        # As the secret holds it.
        monkeypatch.setenv(entry["name"], entry.get("value", "postgresql://collage@database/collage"))
    assert {"secretRef": {"name": "collage-settings", "optional": True}} in server["envFrom"], "any other setting"
    settings = settings_from_environment(folder=tmp_path, token="a-token-of-many-bits-0123456789")
    assert settings.archive_address == "s3://collage/archive"
    cache = next(volume for volume in TEMPLATES["collage-server"]["spec"]["volumes"] if volume["name"] == "data")
    assert FIXED_LIMITS.archive_cache_bytes < int(cache["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30


def test_no_pod_gets_variables_of_the_cluster():
    """A Service called collage-server would set COLLAGE_SERVER_PORT=tcp://…, at which the server stops."""
    assert all(template["spec"]["enableServiceLinks"] is False for template in TEMPLATES.values())
    services = {found["metadata"]["name"] for found in OBJECTS if found["kind"] == "Service"}
    assert "collage-server" not in services


def test_probes_ask_under_a_name_that_is_answered():
    probes = [
        container[probe]["httpGet"]
        for container in containers()
        for probe in ("readinessProbe", "livenessProbe", "startupProbe")
        if probe in container
    ]
    assert len(probes) == 5
    assert all(probe["httpHeaders"] == [{"name": "Host", "value": "localhost"}] for probe in probes)
    assert {probe["path"] for probe in probes} == {"/readyz", "/healthz"}


def test_selectors_find_their_pods():
    labels = [template["metadata"]["labels"].items() for template in TEMPLATES.values()]
    for found in OBJECTS:
        spec = found["spec"]
        chosen = spec.get("selector", spec.get("podSelector"))
        if chosen is not None:
            wanted = chosen.get("matchLabels", chosen).items()
            assert sum(wanted <= own for own in labels) == 1, name_of(found)


def test_the_ingress_leads_to_services_and_names_that_are_answered():
    services = {
        (found["metadata"]["name"], port["name"])
        for found in OBJECTS
        if found["kind"] == "Service"
        for port in found["spec"]["ports"]
    }
    (ingress,) = (found for found in OBJECTS if found["kind"] == "Ingress")
    named = [argument for container in containers() for argument in container["args"]]
    for rule in ingress["spec"]["rules"]:
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert (backend["name"], backend["port"]["name"]) in services
        assert rule["host"] in named


def test_all_run_the_image_of_one_release_without_rights():
    assert len({container["image"] for container in containers()}) == 1
    for container in containers():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert all(template["spec"]["securityContext"]["runAsUser"] == 10001 for template in TEMPLATES.values())
    assert "USER 10001" in (ROOT / "Dockerfile").read_text()
