"""Going back to a checkpoint in one process: a new attempt, and nothing that is done again counts twice."""

import copy

import collage_agent as collage
import pytest
import torch
from collage_server.app import create_app
from collage_server.settings import Settings
from starlette.testclient import TestClient
from torch import nn

from collage_monitor import wire
from collage_monitor.wire import AttemptCreate, StreamCreate
from tests.agent_delivery.doubles import of_kind

_PATHS = {
    "run": "/api/v1/projects/{project}/runs",
    "attempt": "/api/v1/runs/{run}/attempts",
    "stream": "/api/v1/runs/{run}/streams",
    "reports": "/api/v1/streams/{stream}/reports",
    "update": "/api/v1/runs/{run}",
}


class Application:
    """A transport into a server of this process."""

    def __init__(self, client):
        self.client = client

    def send(self, envelope, wait):
        path = _PATHS[envelope.kind].format(
            project=envelope.project, run=envelope.run_id, stream=envelope.stream_id
        )
        method = "PATCH" if envelope.kind == "update" else "POST"
        headers = {"Content-Type": wire.MSGPACK}
        response = self.client.request(method, path, content=envelope.encoded_body(), headers=headers)
        assert response.is_success, response.text
        if envelope.kind != "reports":
            return wire.BatchAnswer(accepted=0, duplicates=0)
        return wire.decode_message(response.content, wire.BatchAnswer, wire.JSON)

    def close(self):
        """Nothing to let go of."""

    def get(self, path, kind):
        response = self.client.get(f"/api/v1{path}")
        assert response.is_success, response.text
        return wire.decode_message(response.content, kind, wire.JSON)


@pytest.fixture
def application(tmp_path):
    with TestClient(create_app(Settings(folder=tmp_path, no_auth=True)), base_url="http://127.0.0.1") as client:
        yield Application(client)


@pytest.fixture
def transport(transport):
    """What a run that has begun reports to."""
    collage.init(transport=transport)
    return transport


class Training:
    """A small training with a checkpoint of everything."""

    def __init__(self, kind=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16)
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.step = 0

    def take(self, steps, log=True):
        for _ in range(steps):
            self.step += 1
            batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(self.step)).to(torch.bfloat16)
            loss = self.model(batch).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if log:
                collage.log({"loss": loss})

    def saved(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.step))

    def load(self, checkpoint):
        model, optimizer, self.step = copy.deepcopy(checkpoint)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def watch(self, **options):
        return collage.watch(self.model, self.optimizer, **{"every": 1, "budget": None, **options})


def attempts(transport):
    """The first steps of the run's attempts, once it has ended."""
    collage.finish()
    return [attempt.first_step for attempt in of_kind(transport, AttemptCreate)]


def went_back(training, how):
    """Watch again from a checkpoint at step 5, after ten steps; as `how` says."""
    first = training.watch()
    training.take(5)
    checkpoint = training.saved()
    training.take(5)
    if how == "a new optimizer":
        training.optimizer = type(training.optimizer)(training.model.parameters(), lr=1e-3)
    elif how != "everything new, nothing removed":
        first.remove()
    if how.startswith("everything new"):
        training = Training()
    training.load(checkpoint)
    training.watch()
    training.take(10)


@pytest.mark.slow
@pytest.mark.drawn(by=lambda how: ("nothing" in how,))
@pytest.mark.parametrize("how", ["removed", "a new optimizer", "everything new", "everything new, nothing removed"])
def test_totals_after_going_back_are_those_of_a_run_that_did_not(application, how):
    collage.init("p", run_id="straight", transport=application)
    training = Training()
    training.watch()
    training.take(15)
    collage.finish()
    collage.init("p", run_id="again", transport=application)
    went_back(Training(), how)
    collage.finish()
    assert [attempt.first_step for attempt in application.get("/runs/again", wire.Run).attempts] == [1, 6]
    asked = "/compare?run=straight&run=again&metric=edq_ratio&points=100"
    straight, again = application.get(asked, wire.Comparison).runs
    assert again.series.steps == straight.series.steps == list(range(1, 16))
    assert again.merged["sampled"] == straight.merged["sampled"]
    assert again.series.values == straight.series.values
    for key in ("edq_ratio", "lost_update_ratio", "update_norm"):
        assert again.merged.get(key) == straight.merged.get(key), key
    names = [layer.name for layer in application.get("/runs/again/layers", wire.LayerList).layers]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
def test_all_ranks_call_the_new_launch_alike_and_streams_differ(transport):
    went_back(Training(), "removed")
    run = collage.current_run()
    assert run is not None
    collage.finish()
    launches = list(dict.fromkeys(message.launch_id for message in of_kind(transport, AttemptCreate)))
    streams = {message.stream_id: message.launch_id for message in of_kind(transport, StreamCreate)}
    assert list(streams.values()) == launches
    assert len(launches) == len(streams) == 2
    again = {envelope.stream_id for envelope in transport.envelopes if envelope.report_count}
    assert again == set(streams)
    assert run.reports_made == run.reports_sent == len(transport.reports) == 20


def test_watching_on_without_going_back_stays_in_the_attempt(transport):
    training = Training()
    handle = training.watch()
    training.take(5)
    handle.remove()
    training.watch()
    training.take(5)
    assert attempts(transport) == [1]
    assert [report.step for report in transport.reports] == list(range(1, 11))


def test_a_second_model_that_begins_later_opens_no_attempt(transport):
    generator, critic = Training(), Training(torch.optim.SGD)
    generator.watch()
    generator.take(5)
    critic.watch()
    critic.take(3)
    assert attempts(transport) == [1]


@pytest.mark.slow
def test_a_model_of_the_same_kind_that_begins_later_or_steps_beside_opens_no_attempt(transport):
    first, fresh, beside = Training(), Training(), Training()
    first.watch()
    first.take(5)
    fresh.watch()
    fresh.take(2)
    beside.take(3)
    beside.watch()
    first.take(1)
    fresh.take(1)
    beside.take(2)
    assert attempts(transport) == [1]


def test_two_watches_of_one_optimizer_open_no_attempt(transport):
    training = Training(torch.optim.SGD)
    training.watch(layers="weight")
    training.take(3)
    training.watch(layers="bias")
    training.take(3)
    assert attempts(transport) == [1]


@pytest.mark.slow
def test_two_models_that_go_back_together_open_one_attempt(transport):
    pair = [Training(), Training(torch.optim.Adam)]
    handles = [training.watch() for training in pair]
    for training in pair:
        training.take(5)
    checkpoints = [training.saved() for training in pair]
    for training in pair:
        training.take(5)
    for training, handle, checkpoint in zip(pair, handles, checkpoints, strict=True):
        handle.remove()
        training.load(checkpoint)
        training.watch()
    for _ in range(5):
        for training in pair:
            training.take(1)
    assert attempts(transport) == [1, 6]
    assert len(of_kind(transport, StreamCreate)[-1].layers) == 8


@pytest.mark.slow
def test_one_optimizer_for_each_parameter_opens_no_attempt(transport):
    model = Training().model
    optimizers = [torch.optim.SGD([parameter], lr=1e-3) for parameter in model.parameters()]
    for number, optimizer in enumerate(optimizers):
        if number % 2:
            collage.watch(model, optimizer, every=1, budget=None)
    collage.watch(model, optimizers[::2], every=1, budget=None)
    for _ in range(4):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert attempts(transport) == [1]
