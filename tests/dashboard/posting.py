"""Sends a generated run to a real server through the wire, message by message, as an agent does."""

import numpy as np

from collage_monitor import wire
from collage_monitor.client import Client
from tests.waiting import PATIENCE_SECONDS

START = 1.7e9
SECONDS_PER_STEP = 0.5


def post_run(server_url, run, token=None, steps=None, *, first=1, transport=None):
    """Create the run, its attempt and stream, send the reports up to `steps` (None: all), and give it its state.

    Posting again with more steps extends the run: what is there already counts as a duplicate. Another `first` is
    another attempt, which begins there. `transport` replaces the network.
    """
    resumed = "" if first == 1 else f"{first}-"
    launch, stream_id = (f"{kind}-{resumed}{run.run_id}"[:64] for kind in ("launch", "stream"))
    described = {"name": run.name, "group": run.group, "tags": ["test"], "seed": run.seed, "config": run.config}
    measured = {"statistics": list(run.totals(run.measured[0])), "layers": run.layers, "watch": run.watch()}
    sent = [step for step in run.measured if first <= step <= (steps or run.steps)]
    reports = [_report(run, seq, step) for seq, step in enumerate(sent)]
    with Client(server_url, token, timeout_seconds=PATIENCE_SECONDS, transport=transport) as client:
        client.create_run("demo", wire.RunCreate(run_id=run.run_id, **described))
        client.create_attempt(run.run_id, wire.AttemptCreate(launch_id=launch, first_step=first))
        stream = wire.StreamCreate(stream_id=stream_id, launch_id=launch, **measured)
        client.create_stream(run.run_id, stream)
        answer = client.send_reports(stream_id, wire.ReportBatch(reports=reports))
        assert answer.accepted + answer.duplicates == len(reports), answer
        client.update_run(run.run_id, wire.RunUpdate(state=run.state))


def _report(run, seq, step):
    totals = run.totals(step)
    merged = run.model_totals(step)
    return wire.Report(
        seq=seq,
        step=step,
        time=START + SECONDS_PER_STEP * step,
        scalars=run.scalars(step),
        statistic_count=len(totals),
        layer_count=len(run.layers),
        statistics=wire.array_to_bytes(np.stack(list(totals.values()))),
        model=wire.array_to_bytes(np.array([float(merged[key]) for key in totals])),
    )
