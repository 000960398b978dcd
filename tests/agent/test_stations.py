"""docs/architecture.md draws two paths through the agent: a measured step and its report pass these files so."""

import collage_agent as collage
import pytest
import torch

from tests.stations import called_files, passes, stations_of


@pytest.fixture
def model():
    return torch.nn.Linear(80, 80, dtype=torch.bfloat16)


def step(model, optimizer):
    model(torch.randn(4, 80, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()


def test_a_measured_step_passes_its_stations(model):
    optimizer = torch.optim.AdamW(model.parameters())
    collage.watch(model, optimizer, every=1)
    step(model, optimizer)
    with called_files("collage_agent") as called:
        step(model, optimizer)
    stations = stations_of("How an update is measured")
    assert passes(called, stations)
    assert not passes(called, stations[::-1])


@pytest.mark.slow
def test_a_report_passes_its_stations_on_the_way_out(model, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    with called_files("collage_agent") as called:
        run = collage.init("p", "run", dir=tmp_path, server_url="http://127.0.0.1:9", token="t" * 40)
        collage.watch(model, optimizer, every=1)
        step(model, optimizer)
        run.stop(5.0)
    stations = stations_of("How a report travels")
    out = stations[: stations.index("transport/http.py") + 1]
    assert len(out) == 5
    assert passes(called, out)
