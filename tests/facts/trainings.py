"""The demo in small, four sick runs and two healthy ones: trained for real, sent to a server here, and kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import collage_agent as collage
import httpx
import torch
from collage_agent.transport import MemoryTransport
from collage_demo import training
from collage_demo.corpus import Corpus
from collage_demo.recipe import PLANS, Plan, Recipe
from collage_demo.training import TrainingLoop, new_model, train
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from collage_monitor.client import Client
from tests.agent_delivery.test_attempts import Application

RECIPE = Recipe(
    steps=96,
    batch_size=4,
    length=32,
    layers=1,
    width=32,
    learning_rate=2e-4,
    warm_up_steps=8,
    measure_every=2,
    validate_every=24,
    validation_batches=2,
)
EXTRA = 20
"""Steps of the demo's resumed run for which it waits for an alert that this server is made to find later."""


class Kept(Application):
    """A transport into the server that keeps what was sent, decoded from its encoded form."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.memory = MemoryTransport()

    def send(self, envelope: Any, wait: Callable[[float], bool]) -> Any:
        answer = super().send(envelope, wait)
        self.memory.send(envelope, wait)
        return answer


def text() -> Corpus:
    """Bytes with something to learn: a step through the alphabet, with noise."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.cumsum(torch.randint(0, 3, (12_000,), generator=generator), 0) % 96 + 32
    whole = walk.to(torch.uint8)
    return Corpus(whole[:9000], whole[9000:])


def quiet(*_: Any) -> None:
    """Nothing is told of progress."""


def train_all(transport: Kept, folder: Any) -> tuple[list[str], list[str]]:
    """Ids of the demo's runs and of the others, trained one after another."""
    corpus = text()

    def demo(plan: Plan, **more: Any) -> str:
        return train(plan, RECIPE, corpus, quiet, folder=folder, transport=transport, **more).run_id

    runs = [demo(plan) for plan in PLANS]
    training._PATIENCE_STEPS, patience = EXTRA, training._PATIENCE_STEPS
    try:
        runs.append(demo(Plan("light", "bfloat16"), loses_residuals=True, name="resumed without residuals"))
    finally:
        training._PATIENCE_STEPS = patience
    others = []
    second = replace(RECIPE, seed=2)
    for plan in (Plan("plus", "bfloat16"), Plan("master-weights", "bfloat16")):
        name = f"{plan.name}, seed 2"
        others.append(train(plan, second, corpus, quiet, folder=folder, transport=transport, name=name).run_id)
    return runs, others + [sick(name, corpus, transport, folder) for name, sick in SICK.items()]


def falls(name: str, corpus: Corpus, transport: Kept, folder: Any) -> str:
    """Its learning rate falls to a two-hundredth in the middle, below what bfloat16 holds."""
    recipe = replace(RECIPE, learning_rate=4e-3, warm_up_steps=1)
    loop = TrainingLoop(Plan("plain", "bfloat16"), recipe, corpus, quiet)
    with collage.init("sick", name, dir=folder, transport=transport) as run:
        loop.watch(first_step=1)
        loop.take(range(1, 61))
        loop.recipe = replace(recipe, learning_rate=recipe.learning_rate / 200)
        loop.rates = [rate / 200 for rate in loop.rates]
        loop.take(range(61, 121))
    return run.run_id


def of_torch(name: str, corpus: Corpus, transport: Kept, folder: Any) -> str:
    """torch's AdamW in bfloat16: decay is an operation of its own, and all of it is rounded away."""

    def build(plan: Plan, recipe: Recipe) -> Any:
        model = new_model(plan, recipe)
        return model, [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)]

    plan, recipe = Plan("plain", "bfloat16"), replace(RECIPE, learning_rate=1e-3)
    more: Any = {"project": "sick", "name": name, "build": build}
    return train(plan, recipe, corpus, quiet, folder=folder, transport=transport, **more).run_id


def breaks(name: str, corpus: Corpus, transport: Kept, folder: Any) -> str:
    """Some weights and the loss are NaN near the end."""
    loop = TrainingLoop(Plan("plain", "bfloat16"), RECIPE, corpus, quiet)
    with collage.init("sick", name, dir=folder, transport=transport) as run:
        loop.watch(first_step=1)
        loop.take(range(1, 71))
        with torch.no_grad():
            next(loop.model.parameters())[:, 3] = float("nan")
        loop.take(range(71, 97))
    return run.run_id


def averages(name: str, corpus: Corpus, transport: Kept, folder: Any) -> str:
    """Healthy weights, and an average of them in bfloat16 that stands still."""
    loop = TrainingLoop(Plan("plus", "bfloat16"), RECIPE, corpus, quiet)
    average = AveragedModel(loop.model, avg_fn=get_ema_avg_fn(0.9999)).bfloat16()
    with collage.init("sick", name, dir=folder, transport=transport) as run:
        loop.watch(first_step=1)
        for step in range(1, 97):
            loop.take(range(step, step + 1))
            average.update_parameters(loop.model)
    return run.run_id


SICK = {
    "falls in the middle": falls,
    "torch's AdamW": of_torch,
    "not a number": breaks,
    "average stands still": averages,
}


def reading_client(inside: Any) -> Client:
    """A client that reads from a server of this process."""

    def forward(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        answer = inside.request(request.method, path, content=request.content, headers={"Host": "127.0.0.1"})
        return httpx.Response(answer.status_code, content=answer.content)

    return Client("http://127.0.0.1", None, transport=httpx.MockTransport(forward))
