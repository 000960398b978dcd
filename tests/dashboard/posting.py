"""Sends a generated run to a real server through the wire, message by message, as an agent does."""

import httpx
import numpy as np

from collage_monitor import wire
from tests.waiting import PATIENCE_SECONDS

START = 1.7e9
SECONDS_PER_STEP = 0.5


def post_run(server_url, run, token=None, steps=None, *, first=1, transport=None):
    """Create the run, its attempt and stream, send the reports up to `steps` (None: all), and give it its state.

    Posting again with more steps extends the run: what is there already counts as a duplicate. Another `first` is
    another attempt, which begins there. `transport` replaces the network.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(
        base_url=f"{server_url}/api/v1",
        headers=headers,
        trust_env=False,
        timeout=PATIENCE_SECONDS,
        transport=transport,
    ) as http:
        create = wire.RunCreate(
            run_id=run.run_id, name=run.name, group=run.group, tags=["test"], seed=run.seed, config=run.config
        )
        _post(http, "/projects/demo/runs", create)
        resumed = "" if first == 1 else f"{first}-"
        launch = f"launch-{resumed}{run.run_id}"[:64]
        _post(http, f"/runs/{run.run_id}/attempts", wire.AttemptCreate(launch_id=launch, first_step=first))
        stream_id = f"stream-{resumed}{run.run_id}"[:64]
        statistics = list(run.totals(run.measured[0]))
        stream = wire.StreamCreate(
            stream_id=stream_id,
            launch_id=launch,
            layers=run.layers,
            statistics=statistics,
            watch=run.watch(),
        )
        _post(http, f"/runs/{run.run_id}/streams", stream)
        sent = [step for step in run.measured if first <= step <= (steps or run.steps)]
        reports = [_report(run, seq, step) for seq, step in enumerate(sent)]
        body = wire.encode_batch(wire.ReportBatch(reports=reports))
        answer = wire.decode_message(
            _send(http, "POST", f"/streams/{stream_id}/reports", body), wire.BatchAnswer, wire.JSON
        )
        assert answer.accepted + answer.duplicates == len(reports), answer
        _send(http, "PATCH", f"/runs/{run.run_id}", wire.encode_message(wire.RunUpdate(state=run.state)))


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


def _post(http, path, message):
    _send(http, "POST", path, wire.encode_message(message))


def _send(http, method, path, body):
    response = http.request(method, path, content=body, headers={"Content-Type": wire.MSGPACK})
    assert response.is_success, response.text
    return response.content
