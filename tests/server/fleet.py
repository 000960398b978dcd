"""Finished runs as a demo leaves them: strategies, rates, sizes and seeds, stuck states, a resume, a blow-up."""

import atexit
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from collage_server.store import ReportGroup, SqliteStore
from collage_server.store.archive.file_storage import Folder

from collage_monitor import wire
from tests.server.migrated import put_migrated
from tests.server.samples import STATISTICS, report, report_of_totals, stream_create, watch
from tests.server.store.contract import LIMITS, NOW

__all__ = ["FLEET", "FleetRun", "archive_all", "fill", "opened"]

NAMES = ("embedding.weight", "blocks.0.weight", "blocks.1.weight")
KEYS = [*STATISTICS, "distorted", "faithful", "nonfinite_gradients"]
LATER = "state_zero/exp_avg_sq"
"""Only one run reports it."""


@dataclass(frozen=True)
class FleetRun:
    """One run; `resumed` launches: a second one begins at that step and hides the first one's from there on."""

    run_id: str
    strategy: str
    rate: float
    width: int = 16
    seed: int = 0
    stuck: bool = False
    resumed: int | None = None
    steps: int = 80
    more: tuple[str, ...] = ()
    nonfinite_from: int | None = None

    @property
    def keys(self):
        return [*KEYS, *self.more]


FLEET = (
    FleetRun("plain-3-a", "plain", 1e-3, stuck=True),
    FleetRun("plain-3-b", "plain", 1e-3, seed=1, stuck=True),
    FleetRun("plain-4", "plain", 1e-4, stuck=True, steps=50),
    FleetRun("plain-wide", "plain", 1e-3, width=64, resumed=41),
    FleetRun("light-3", "light", 1e-3, more=(LATER,)),
    FleetRun("light-4-wide", "light", 1e-4, width=64),
    FleetRun("plus-3-a", "plus", 1e-3),
    FleetRun("plus-3-b", "plus", 1e-3, seed=1, nonfinite_from=60),
)
_KEPT = {"plain": 0.6, "light": 0.97, "plus": 1.0}


def numbers(run, step, attempt):
    """[statistic][layer] of one step, with random mantissas."""
    chance = np.random.default_rng([zlib.crc32(run.run_id.encode()), step, attempt])
    at = {key: np.zeros(len(NAMES)) for key in run.keys}
    elements = float(run.width * 16)
    depth = np.arange(len(NAMES))
    grows = (1 + step / 40 + depth) * (1e-3 / run.rate) ** 0.25
    lost = (1 - _KEPT[run.strategy]) * grows * chance.uniform(0.7, 1.3)
    squares = chance.lognormal(size=len(NAMES))
    at["measured_steps"][:] = 1
    at["elements"][:] = elements
    at["sampled"][:] = elements
    at["active_blocks"][:] = 30
    at["idle"][:] = 4
    active = elements - 4
    at["lost"] = np.floor(np.minimum(lost, 1.0) * active * 0.9)
    at["lost_visible"] = at["lost"]
    at["faithful"] = np.floor((active - at["lost"]) / 2)
    at["distorted"] = active - at["lost"] - at["faithful"]
    at["unchanged"] = at["lost"] + 4
    at["intended_squared_sum"] = squares
    arrived = squares * (1 - 0.8 * np.minimum(lost, 1.0))
    at["intended_effective_sum"] = arrived * chance.uniform(0.98, 1.02, len(NAMES))
    at["intended_visible_sum"] = 0.9 * at["intended_effective_sum"]
    at["effective_squared_sum"] = squares
    at["gradient_squared_sum"] = chance.lognormal(size=len(NAMES))
    at["parameter_squared_sum"] = 100.0 + step + depth
    at["state_decrement_intended_sum/exp_avg_sq"] = -squares
    at["state_decrement_observed_sum/exp_avg_sq"] = -squares * (0.01 if run.stuck else 0.99)
    if run.nonfinite_from is not None and step >= run.nonfinite_from:
        at["nonfinite_gradients"][1] = 3
    return np.array([at[key] for key in run.keys])


def fill(store, runs=FLEET, project="p"):
    """Store the runs and end them."""
    for run in runs:
        config = {"learning_rate": run.rate, "seed": run.seed}
        create = wire.RunCreate(run_id=run.run_id, name=run.run_id, seed=run.seed, config=config)
        store.runs.create(project, create, NOW)
        launch(store, run, 1, 1)
        if run.resumed is not None:
            launch(store, run, 2, run.resumed)
        store.runs.update(run.run_id, wire.RunUpdate(state="finished"), NOW + 100)


def launch(store, run, attempt, first_step, rank=0):
    """One attempt: registered, and all that a rank of it reports."""
    launched = f"launch-{attempt}"
    store.streams.create_attempt(run.run_id, wire.AttemptCreate(launch_id=launched, first_step=first_step), NOW)
    given: dict[str, Any] = {"dtype": "bfloat16", "elements": 16 * run.width, "module_type": "Linear"}
    layers = [wire.Layer(name=name, shape=[run.width, 16], **given) for name in NAMES]
    stream_id = f"{run.run_id}-{attempt}" + (f"-{rank}" if rank else "")
    watched = watch(run.strategy)
    create = stream_create(stream_id, launched, layers=layers, statistics=run.keys, watch=watched, rank=rank)
    store.streams.create_stream(run.run_id, create, NOW)
    stream = store.streams.stream_record(stream_id)
    steps = range(first_step, run.steps + 1)
    reports = [report_of(run, i, step, attempt + 10 * rank) for i, step in enumerate(steps)]
    store.journal.append([ReportGroup(stream, reports)], NOW)


def report_of(run, seq, step, attempt):
    values = numbers(run, step, attempt)
    # Shards merge by the sum, but for what is no amount of the step.
    merged = zip(run.keys, values, strict=True)
    model = np.array([row.max() if key == "measured_steps" else row.sum() for key, row in merged])
    scalars = report(seq, step, measured=False).scalars
    return report_of_totals(seq, step, values, model=wire.array_to_bytes(model), scalars=scalars)


def opened(folder):
    """A store in `folder` that holds the fleet, archived: made once a process."""
    shutil.copytree(_content(), folder, dirs_exist_ok=True)
    return _open(folder / "collage.sqlite")


def _open(path):
    archive = Folder(path.parent / "archive")
    store = SqliteStore(path, stale_after_seconds=600.0, limits=LIMITS, archive=archive)
    store.open()
    return store


@cache
def _content():
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    store = _open(put_migrated(folder))
    fill(store)
    archive_all(store)
    store.close()
    return folder


def archive_all(store, runs=FLEET):
    """Seal the runs and make files of all that they hold."""
    for run in runs:
        while store.sealing.seal(run.run_id, NOW + 10_000) or store.archiving.archive(run.run_id):
            pass
