"""verl's plugin, in processes of their own, with a replica of verl 0.9.1's loader, workers and tracking."""

import json
import tomllib
from pathlib import Path

import pytest

from collage_monitor.environment import ATTACH
from tests.forking import TORCH, run_forked
from tests.launching.forked import forked_python, launched, write

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

LOADER = """
import logging
from importlib.metadata import entry_points

from .utils import tracking

for _ep in entry_points(group="verl.plugins"):
    try:
        _ep.load()
    except Exception as _e:
        logging.getLogger(__name__).error("Failed to load plugin '%s': %s", _ep.name, _e)
"""
TRACKING = """
class Tracking:
    def __init__(self):
        self.logged = []

    def log(self, data, step, backend=None):
        self.logged.append((step, data))
"""
WORKERS = """
import types
import torch

class Engine:
    def __init__(self, width):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(width, 3).bfloat16()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6)

    def train_batch(self):
        self.optimizer.zero_grad()
        self.module(torch.randn(4, self.module.in_features).bfloat16()).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()

class TrainingWorker:
    def __init__(self, model_type, width):
        self.config, self.engine = types.SimpleNamespace(model_type=model_type), Engine(width)

    def train_mini_batch(self):
        self.engine.train_batch()

class ActorRolloutRefWorker:
    def __init__(self):
        self.actor = TrainingWorker("language_model", 30)
        self.rollout = torch.nn.Linear(30, 3)

    def update_actor(self):
        self.actor.train_mini_batch()

    def generate_sequences(self):
        with torch.no_grad():
            self.rollout(torch.randn(4, 30))
"""
TRAINING = """
import json, sys
import verl
from verl.workers import ActorRolloutRefWorker, TrainingWorker
from verl.utils.tracking import Tracking

actor, critic, tracking = ActorRolloutRefWorker(), TrainingWorker("value_model", 20), Tracking()
for step in range(1, 6):
    actor.generate_sequences()
    if "critic" in sys.argv:
        critic.train_mini_batch()
    actor.update_actor()
    tracking.log({"training/rollout_probs_diff_mean": 0.01, "rollout_corr/k3_kl": 0.002, "actor/pg_loss": 1.5,
                  "text": "x", "none": float("nan")}, step)
assert len(tracking.logged) == 5
found = {"agent": "collage_agent" in sys.modules}
if found["agent"]:
    import collage_agent
    run = collage_agent.current_run()
    watches = [slot.watch for slot in run._slots.values()]
    found |= {"name": run.name, "layers": [[*watch._assembly.watched] for watch in watches],
              "health": [watch.judgement().health for watch in watches], "steps": [watch.step for watch in watches]}
print("found", json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "verl"
    (package / "utils").mkdir(parents=True)
    write(package, LOADER, "__init__.py")
    write(package, WORKERS, "workers.py")
    write(package / "utils", "", "__init__.py")
    write(package / "utils", TRACKING, "tracking.py")
    # What an installation of this project says of itself.
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    own = tmp_path / "plugin_of_this_checkout-1.dist-info"
    own.mkdir()
    write(own, "Metadata-Version: 2.1\nName: plugin-of-this-checkout\nVersion: 1\n", "METADATA")
    lines = "\n".join(f"{name} = {value}" for name, value in groups["verl.plugins"].items())
    write(own, f"[verl.plugins]\n{lines}\n", "entry_points.txt")
    write(tmp_path, TRAINING)
    return tmp_path


@pytest.fixture(scope="module")
def forked():
    """Who looks whether the agent is imported starts where it is not."""
    with forked_python() as path:
        yield path


def found_by(python, folder, *arguments, **variables):
    asking = {ATTACH: "1", "COLLAGE_EVERY": "1", "PYTHONPATH": str(folder), **variables}
    return found_in(launched(folder, python, "train.py", *arguments, watched=False, **asking))


def found_in(done):
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found ")), done


def test_nobody_is_watched_who_has_not_asked(folder):
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{TRAINING}"
    found, done = found_in(run_forked(TORCH, "-c", program, folder=folder))
    assert found == {"agent": False}
    assert "collage" not in done.stderr


def test_the_actor_is_watched_and_the_rollout_is_not_and_what_verl_logs_has_its_names(forked, folder):
    found, _ = found_by(forked, folder)
    assert found["name"] == "actor"
    assert found["layers"] == [["weight", "bias"]]
    assert found["health"] == ["losing updates"]
    assert found["steps"] == [5]
    kept = b"".join(path.read_bytes() for path in (folder / "data" / "spool").rglob("*") if path.is_file())
    for name in (b"rollout_probs_diff_mean", b"k3_kl", b"actor/pg_loss"):
        assert name in kept
    assert b"training/rollout" not in kept


def test_a_critic_in_the_same_process_has_its_role_before_its_layers(forked, folder):
    found, _ = found_by(forked, folder, "critic", COLLAGE_RUN_NAME="grpo")
    assert found["name"] == "grpo-critic"
    assert found["layers"] == [["weight", "bias"], ["actor.weight", "actor.bias"]]
