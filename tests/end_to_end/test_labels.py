"""Labelled metrics through the real server: every route takes their keys and tells what the handle told."""

from collections.abc import Iterator

import collage_agent as collage
import pytest
import torch
from collage_dashboard.descriptions import describe
from collage_dashboard.figures.heatmap import heatmap as heatmap_figure
from collage_dashboard.view import View, read_address, write_address
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.client import Client
from collage_monitor.local import read_token
from collage_monitor.wire import from_number
from tests.end_to_end.servers import killable_server

pytestmark = pytest.mark.slow

KEYS = (
    "edq_window_ratio/8",
    "lost_visible_window_ratio/16",
    "counterfactual_edq_ratio/light/bf16",
    "counterfactual_edq_ratio/plain/fp8",
    "counterfactual_variance_ratio/stochastic/bf16",
    "state_zero_ratio/exp_avg_sq",
    "residual_fill_ratio",
    "decay_ratio",
)
STEPS = 100
CLIP = 0.05


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Iterator[tuple[Client, str, dict]]:
    """(client, run id, the handle's summary) after a hundred clipped steps; the last one ends windows."""
    with killable_server(tmp_path_factory.mktemp("labels")) as server:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(torch.bfloat16)
        optimizer = CollageAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), strategy="light")
        run = collage.init(project="labels", server_url=server.url, dir=server.folder)
        handle = collage.watch(model, optimizer, every=4, windows=(8, 16), sample="all")
        for _ in range(STEPS):
            model(torch.randn(16, 8, dtype=torch.bfloat16)).float().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            collage.log({"grad_norm_unclipped": norm})
        summary = handle.summary()
        collage.finish()
        with Client(server.url, read_token(server.folder)) as client:
            yield client, run.run_id, summary


@pytest.mark.parametrize("key", KEYS)
def test_every_route_takes_the_key_and_the_dashboard_draws_it(key, told):
    client, run_id, summary = told
    expected = summary["model"][key]
    assert expected is not None
    series = client.series(run_id, key)
    values = [from_number(value) for value in series.values if value is not None]
    assert values[-1] == pytest.approx(expected, rel=1e-12)
    layer = client.series(run_id, key, layer="0.weight")
    own = [from_number(value) for value in layer.values if value is not None]
    assert own[-1] == pytest.approx(summary["layers"]["0.weight"][key], rel=1e-12)
    cells = client.heatmap(run_id, key)
    assert cells.metric == key
    assert any(value is not None for row in cells.values for value in row)
    assert heatmap_figure(cells).data
    assert describe(key).title
    view = View(page="run", runs=(run_id,), metric=key)
    assert read_address(*write_address(view)).metric == key
    layers = {entry.name for entry in client.layers(run_id).layers}
    assert {worst.layer for worst in client.worst(run_id, metric=key)} <= layers
    assert key in client.latest(run_id).model
    (compared,) = client.compare([run_id], key).runs
    assert compared.merged[key] is not None


@pytest.mark.parametrize("name", ["update_ulp_histogram", "residual_fill_histogram"])
def test_histograms_have_their_route(name, told):
    client, run_id, _ = told
    assert sum(from_number(count) for count in client.histogram(run_id, name=name).counts) > 0


def test_the_clip_ratio_is_made_from_what_was_logged(told):
    client, run_id, _ = told
    ratios = client.series(run_id, "clip_ratio")
    norms = client.series(run_id, "grad_norm")
    unclipped = client.series(run_id, "grad_norm_unclipped")
    logged = dict(zip(unclipped.steps, unclipped.values, strict=True))
    assert ratios.steps == norms.steps
    for step, ratio, norm in zip(ratios.steps, ratios.values, norms.values, strict=True):
        assert from_number(ratio) == pytest.approx(from_number(norm) / from_number(logged[step]), rel=1e-9)
    assert min(from_number(ratio) for ratio in ratios.values) < 1.0
    (compared,) = client.compare([run_id], "clip_ratio").runs
    assert compared.series.values == ratios.values
