"""A training whose agent and server have `examples/extension_statistic` installed; run by test_extensions.py."""

import tempfile
from pathlib import Path

import collage_agent as collage
import httpx
import torch

from collage_monitor.client import Client
from collage_monitor.local import read_token
from tests.end_to_end.servers import killable_server

NAME = "sign_agreement_ratio"


def run() -> None:
    """Train, send, read back: what the server tells is what counting element by element tells."""
    with tempfile.TemporaryDirectory() as folder, killable_server(Path(folder)) as server:
        token = read_token(server.folder)
        run = collage.init(project="extension", server_url=server.url, token=token, dir=server.folder)
        handle, of_model, of_layer = train()
        collage.finish()
        told = handle.summary()
        assert told["model"][NAME] == of_model[12]
        assert told["layers"]["0.weight"][NAME] == of_layer[12]
        assert 0.5 < of_model[12] < 1
        with Client(server.url, token) as client:
            series = client.series(run.run_id, NAME)
            assert dict(zip(series.steps, series.values, strict=True)) == of_model
            layer = client.series(run.run_id, NAME, layer="0.weight")
            assert layer.values == list(of_layer.values())
            assert client.latest(run.run_id).model[NAME] == of_model[12]
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{server.url}/api/v1/metrics-catalogue", headers=headers, trust_env=False).json()
    (entry,) = (entry for entry in answer["metrics"] if entry["name"] == NAME)
    assert (entry["unit"], entry["needs"]) == ("ratio", ["sign_agreement", "sign_compared"])
    assert {"sign_agreement", "sign_compared"} <= {entry["name"] for entry in answer["statistics"]}


def train() -> tuple[collage.Watch, dict[int, float], dict[int, float]]:
    """The watch, and by measured step the share of the model and of its first layer, counted one by one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    handle = collage.watch(model, optimizer, every=4, sample="all")
    of_model, of_layer = {}, {}
    for step in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(16, 24).bfloat16()).float().square().mean().backward()
        before = [(p.detach().double().clone(), gradient_of(p)) for p in model.parameters()]
        optimizer.step()
        counted = [
            agreement(p.detach().double() - weight, gradient)
            for p, (weight, gradient) in zip(model.parameters(), before, strict=True)
        ]
        if step == 1 or step % 4 == 0:
            of_model[step] = sum(agreed for agreed, _ in counted) / sum(compared for _, compared in counted)
            of_layer[step] = counted[0][0] / counted[0][1]
    return handle, of_model, of_layer


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.double().clone()


def agreement(moved: torch.Tensor, gradient: torch.Tensor) -> tuple[int, int]:
    pairs = zip(moved.flatten().tolist(), gradient.flatten().tolist(), strict=True)
    compared = [(e, g) for e, g in pairs if e and g]
    return sum((e < 0) != (g < 0) for e, g in compared), len(compared)
