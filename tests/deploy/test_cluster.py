"""server/deploy/cluster, filled as on three machines and as `make cluster` fills it; nothing is started."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from collage_server.store.records import CONNECTIONS

from drills.cluster.database import NODES, SHIPPED, fill, values
from tests.server.store.postgresql import find_programs
from tests.system import is_content

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ("etcd.yml", "patroni.yml", "haproxy.cfg")
SECRETS = {"SUPERUSER_PASSWORD": "of-the-superuser", "REPLICATION_PASSWORD": "of-the-replicas"}


def on_three_machines(node, folder):
    """As shipped: with the addresses of cluster.env."""
    folder.mkdir(exist_ok=True)
    environment = {"PATH": "/usr/bin:/bin", **SECRETS}
    subprocess.run(["sh", SHIPPED / "fill.sh", str(node), folder], env=environment, check=True)


def on_this_machine(node, folder):
    """As the lane fills it."""
    fill(node, folder, values(find_programs() or Path("/usr/lib/postgresql/15/bin"), (7411, 7412, 7413)))


@pytest.fixture(params=[on_three_machines, on_this_machine], ids=["three-machines", "lane"])
def filled(request, tmp_path):
    """The files of node 2."""
    request.param(2, tmp_path / "node2")
    return {name: (tmp_path / "node2" / name).read_text() for name in NAMES}


@pytest.fixture
def patroni(filled):
    return yaml.safe_load(filled["patroni.yml"])


def test_all_is_filled(filled):
    assert not any("$" in text for text in filled.values())
    assert yaml.safe_load(filled["etcd.yml"])["name"] == yaml.safe_load(filled["patroni.yml"])["name"] == "node2"


def test_the_lane_states_what_the_shipped_values_do():
    shipped = set(re.findall(r"^(\w+)=", (SHIPPED / "cluster.env").read_text(), re.MULTILINE))
    own = {"ETCD_DATA", "DATABASE_DATA", "SOCKETS"}
    assert set(values(Path("/"), (1, 2, 3))) | own == shipped


def test_passwords_must_be_stated_and_are_for_their_owner_alone(tmp_path):
    command = ["sh", SHIPPED / "fill.sh", "1", tmp_path]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
    assert done.returncode != 0
    assert b"openssl rand" in done.stderr
    on_three_machines(1, tmp_path / "node1")
    assert {(tmp_path / "node1" / name).stat().st_mode & 0o077 for name in NAMES} == {0}


def test_the_database_keeps_what_is_acknowledged_a_lease_that_lasts_and_room_for_all_servers(patroni):
    """Nothing is acknowledged that one machine alone has. A lease outlasts two tries, by Patroni's own rule: with
    less, a slow etcd costs the primary its lease.
    """
    dcs = patroni["bootstrap"]["dcs"]
    parameters = dcs["postgresql"]["parameters"]
    assert dcs["synchronous_mode"] is dcs["synchronous_mode_strict"] is True
    assert parameters["synchronous_commit"] == "on"
    assert dcs["loop_wait"] + 2 * dcs["retry_timeout"] <= dcs["ttl"]
    assert parameters["max_connections"] >= len(NODES) * CONNECTIONS + 20


def test_a_node_is_found_under_the_addresses_that_others_know(filled, patroni):
    etcd = yaml.safe_load(filled["etcd.yml"])
    addresses = [f"http://{host}" for host in patroni["etcd3"]["hosts"]]
    assert etcd["listen-client-urls"] == addresses[1]
    assert f"node2={etcd['initial-advertise-peer-urls']}" in etcd["initial-cluster"].split(",")
    port = patroni["restapi"]["listen"].split(":")[1]
    assert f"server node2 {patroni['postgresql']['listen']} check port {port}\n" in filled["haproxy.cfg"]


def test_haproxy_takes_its_configuration(filled, tmp_path):
    written = tmp_path / "haproxy.cfg"
    written.write_text(filled["haproxy.cfg"])
    assert "WARNING" not in is_content("haproxy", "-c", "-f", written)
