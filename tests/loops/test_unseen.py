"""Steps that call no hook are noticed and named once; ordinary loops never are. Megatron is a replica."""

import copy
import inspect
import logging
import threading
from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.transport import MemoryTransport
from collage_agent.watching import unseen_steps
from collage_agent.watching.unseen_steps import NOTES
from torch import nn

from collage_monitor.wire import StreamCreate
from tests.agent.training import mlp, mlp_loss
from tests.integrations.trainings import assert_same_training, recorded
from tests.loops.graphs import MegatronOptimizer, OptimizerCudaGraphWrapper

EVERY = 10
WARMUP = 3


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


REPLAYED: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "masters": (adamw, torch.bfloat16, {}),
    "one rank of two": (adamw, torch.bfloat16, {"ranks": 2, "rank": 1}),
    "plain bf16": (adamw, torch.bfloat16, {"masters": False}),
    "fp32": (adamw, torch.float32, {}),
    "momentum": (momentum, torch.bfloat16, {}),
    "without states": (sgd, torch.float32, {}),
}


class Replayed:
    """A Megatron training whose optimizer steps are replayed after a few."""

    def __init__(self, make=adamw, dtype=torch.bfloat16, graph=True, **options):
        self.model = mlp(dtype=dtype)
        self.optimizer = MegatronOptimizer(self.model, make, **options)
        step = self.optimizer.step
        self.take = OptimizerCudaGraphWrapper(step, self.optimizer.memory, WARMUP) if graph else step
        self.losses = []

    @property
    def steps(self):
        return len(self.losses)

    def watched(self, watch=watch, **options):
        return watch(self.model, self.optimizer.optimizer, **{"every": EVERY, **options})

    def backward(self):
        self.optimizer.zero_grad()
        loss = mlp_loss(self.model, self.steps)
        self.optimizer.backward(loss)
        self.losses.append(float(loss.detach()))

    def step(self):
        self.backward()
        self.take()

    def parameters(self):
        """The weights and what is stepped in their place."""
        return [*self.model.parameters(), *(main for *_, main, _ in self.optimizer.shards)]

    def recorded(self):
        return recorded(self, self.optimizer.optimizer, self.losses)


@pytest.mark.parametrize("kind", REPLAYED)
def test_replayed_steps_are_named_within_a_measuring_interval(kind, caplog):
    make, dtype, options = REPLAYED[kind]
    training = Replayed(make, dtype, **options)
    transport = MemoryTransport()
    collage.init("replays", transport=transport)
    handle = training.watched(collage.watch)
    with caplog.at_level(logging.WARNING, logger="collage_agent"):
        for number in range(WARMUP + 1 + EVERY):
            assert number > WARMUP + 1 or "call no hook" not in caplog.text
            training.step()
            collage.log({"loss": 1.0})
    said = [record.message for record in caplog.records if "call no hook" in record.message]
    assert said == [f"{NOTES['nobody']}; training is not affected"]
    assert "handle.before()" in str(handle)
    collage.finish()
    told = [message.watch for message in transport.messages if isinstance(message, StreamCreate)]
    assert told[-1] is not None
    assert "call no hook" in told[-1].intent_reason


READERS: set[int] = set()
"""The threads that read the gradient of a `Seen`."""
GRADIENT: Any = torch.Tensor.grad


class Seen(nn.Parameter):
    @property
    def grad(self):
        READERS.add(threading.get_ident())
        return GRADIENT.__get__(self)

    @grad.setter
    def grad(self, value):
        GRADIENT.__set__(self, value)


def test_another_thread_reads_no_gradient():
    """A backward pass exchanges gradients without Python's lock: a read at that moment ended the process."""
    model = nn.Linear(8, 4)
    model.weight = Seen(model.weight.detach())
    run = collage.init("threads", transport=MemoryTransport())
    handle = collage.watch(model, sgd(model.parameters()), every=EVERY)

    def log_and_look():
        run.log({"loss": 1.0}, step=9)
        handle.look()

    READERS.clear()
    for _ in range(5):
        model(torch.randn(2, 8)).square().mean().backward()
        thread = threading.Thread(target=log_and_look)
        thread.start()
        thread.join()
    assert {threading.get_ident()} >= READERS
    assert "call no hook" not in str(handle)
    collage.finish()


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPLAYED)
def test_replays_between_before_and_after_are_measured_as_steps_are(kind):
    make, dtype, options = REPLAYED[kind]
    found = []
    for graph in (True, False):
        training = Replayed(make, dtype, graph, **options)
        for _ in range(WARMUP + 1):
            training.step()
        handle = training.watched(every=1, sample="all", first_step=training.steps + 1)
        for _ in range(5):
            training.step()
            handle.look()
        counted = handle.step or training.steps - 5
        for _ in range(6):
            training.backward()
            handle.before()
            training.take()
            handle.after()
        assert handle.step == counted + 6
        found.append((handle.summary(), training.recorded()))
    (replayed, its_weights), (stepped, their_weights) = found
    assert_same_training(its_weights, their_weights)
    for summary in (replayed, stepped):
        summary.pop("step")
    assert replayed == stepped
    assert replayed["model"]["edq_ratio"] is not None


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_skipped_step_between_before_and_after_is_none(make):
    """A loss scaler that finds infinities calls no step: nothing has moved."""
    model = mlp(dtype=torch.float32)
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, every=1)
    for step in range(12):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        handle.before()
        if step == 0:
            optimizer.step()
        handle.after()
    assert handle.step == 1
    assert "call no hook" not in str(handle)


@pytest.mark.slow
def test_who_only_logs_is_looked_at_ever_less_often(monkeypatch):
    looks = []
    reading = unseen_steps.UnseenSteps._read

    def counted(*given):
        looks.append(1)
        return reading(*given)

    monkeypatch.setattr(unseen_steps.UnseenSteps, "_read", counted)
    training = Replayed()
    run = collage.init("logs", transport=MemoryTransport())
    handle = training.watched(collage.watch)
    training.step()
    for _ in range(3200):
        run.log({"validation_loss": 1.0})
    assert 5 < len(looks) <= 5 + 3200 / 32
    for _ in range(WARMUP + 40):
        training.step()
        run.log({"loss": 1.0})
    assert "call no hook" in str(handle)
    collage.finish()


def test_looking_changes_nothing():
    left_alone, looked_at = Replayed(), Replayed()
    handle = looked_at.watched()
    for _ in range(12):
        left_alone.step()
        looked_at.step()
        handle.look()
    assert_same_training(left_alone.recorded(), looked_at.recorded())


def test_layers_have_the_names_of_the_weights_that_are_stood_for():
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    inner = MegatronOptimizer(model, adamw, ranks=2, rank=1).optimizer
    handle = watch(model, inner)
    layers = handle._assembly.watched
    assert [*layers] == names
    for name, weight in model.named_parameters():
        assert layers[name].shard.shape == tuple(weight.shape)
        assert layers[name].shard.elements == weight.numel() // 2
        assert layers[name].module_type == "Linear"
    without_masters = MegatronOptimizer(model := mlp(), adamw, masters=False).optimizer
    assert [*watch(model, without_masters)._assembly.watched] == names


class Loop:
    """An ordinary loop; between all that it does somebody looks."""

    def __init__(self, make):
        self.model = mlp(dtype=torch.float32)
        self.optimizer = make(self.model.parameters())
        self.handle = watch(self.model, self.optimizer, every=2)
        self.look = self.handle.look
        self.data = 0

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.look()

    def backward(self):
        loss = mlp_loss(self.model, self.data)
        loss.backward()
        self.data += 1
        self.look()
        return loss

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.look()

    def train(self, steps=3):
        for _ in range(steps):
            self.zero_grad()
            self.backward()
            self.step()

    def evaluate(self, batches):
        self.model.eval()
        with torch.no_grad():
            for step in range(batches):
                mlp_loss(self.model, step)
                self.look()
        self.model.train()

    def write(self, values, through_data=False):
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                (parameter.data if through_data else parameter).copy_(value)
                self.look()

    def load(self, part, state):
        part.load_state_dict(copy.deepcopy(state))
        self.look()

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def noisy(self):
        return [weight + 0.01 * torch.randn_like(weight) for weight in self.weights()]


def rests(loop):
    loop.train(12)
    for _ in range(20):
        loop.look()


def evaluates(loop):
    for _ in range(3):
        loop.train()
        loop.evaluate(8)


def loads_weights(loop):
    loop.train()
    for _ in range(4):
        loop.load(loop.model, loop.model.state_dict())
        loop.write(loop.noisy())
    loop.train()


def evaluates_checkpoints(loop):
    loop.train()
    for _ in range(10):
        loop.write(loop.noisy())
        loop.evaluate(1)


def resumes(loop):
    loop.train()
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    for _ in range(3):
        loop.load(loop.model, saved[0])
        loop.load(loop.optimizer, saved[1])
        loop.train()


def resumes_in_place(loop):
    """As torch.distributed.checkpoint loads: into the tensors that there are, then through the optimizer."""
    loop.train()
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.train()
    for parameter, state in zip(loop.model.parameters(), saved["state"].values(), strict=False):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                loop.optimizer.state[parameter][key].copy_(value)
    loop.look()
    loop.load(loop.optimizer, saved)
    loop.train()


def swaps_an_average(loop):
    average = loop.weights()
    for number in range(16):
        if number % 8 < 4:
            loop.train()
        own = loop.weights()
        average = [0.9 * a + 0.1 * w for a, w in zip(average, own, strict=True)]
        loop.write(average, through_data=number >= 8)
        loop.write(own, through_data=number >= 8)


def swaps_storages(loop):
    for _ in range(3):
        loop.train()
        own = [parameter.data for parameter in loop.model.parameters()]
        for values in ([value + 0.1 for value in own], own):
            for parameter, value in zip(loop.model.parameters(), values, strict=True):
                parameter.data = value
                loop.look()


def accumulates(loop):
    for _ in range(3):
        loop.zero_grad()
        for _ in range(8):
            loop.backward()
        loop.step()


def steps_two_optimizers(loop):
    other = mlp(seed=1, dtype=torch.float32)
    its = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for step in range(24):
        its.zero_grad()
        mlp_loss(other, step).backward()
        loop.backward()
        its.step()
        loop.look()
        if step % 8 == 7:
            loop.step()
            loop.zero_grad()


def ties_weights(loop):
    loop.model[2].weight = nn.Parameter(torch.eye(70))
    loop.model[4].weight = nn.Parameter(loop.model[2].weight[:5].detach().clone())
    loop.train(6)


def averages_stochastic_weights(loop):
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for _ in range(4):
        loop.train()
        average.update_parameters(loop.model)
        loop.look()
    torch.optim.swa_utils.update_bn([torch.randn(4, 30)], average)
    loop.write([parameter.detach() for parameter in average.module.parameters()])


def warms_up(loop):
    schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.01, total_iters=8)
    for _ in range(8):
        loop.train(1)
        schedule.step()
        loop.look()


def unfreezes(loop):
    for frozen in (True, False):
        loop.model[0].requires_grad_(not frozen)
        loop.look()
        loop.train()


def adds_a_group(loop):
    loop.train()
    extra = nn.Linear(3, 3)
    loop.optimizer.add_param_group({"params": list(extra.parameters())})
    for _ in range(4):
        extra(torch.randn(2, 3)).sum().backward()
        loop.train(1)


def skips_steps(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=1)
    for step in range(10):
        loop.zero_grad()
        scaler.scale(mlp_loss(loop.model, step)).backward()
        loop.look()
        scaler.step(loop.optimizer)
        loop.look()
        scaler.update()


def takes_closures(loop):
    def closure():
        loop.optimizer.zero_grad()
        return loop.backward()

    for _ in range(6):
        loop.step(closure)


def perturbs_and_returns(loop):
    """As SAM does: a step up, a gradient there, back, and a step."""
    for _ in range(6):
        loop.zero_grad()
        loop.backward()
        own = loop.weights()
        loop.write(loop.noisy())
        loop.backward()
        loop.write(own)
        loop.step()


def moves_states(loop):
    """As offloading does: to other memory and back, and once forgotten."""
    for _ in range(3):
        loop.train()
        for state in loop.optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})
            loop.look()
    loop.optimizer.state.clear()
    loop.look()
    loop.train()


def compiles(loop):
    loop.model.forward = torch.compile(loop.model.forward, backend="eager")
    loop.train(4)


def writes_over_its_weights(loop):
    """As clipping does; and local SGD, every few steps: the mean of other workers' weights."""
    for _ in range(5):
        loop.train(1)
        loop.write([weight.clamp(-0.1, 0.1) for weight in loop.weights()])
        loop.train(2)
        loop.write([(own + other) / 2 for own, other in zip(loop.weights(), loop.noisy(), strict=True)])


ORDINARY = [
    own for own in [*globals().values()] if inspect.isfunction(own) and "loop" in inspect.signature(own).parameters
]
"""All functions above that take a loop."""


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("make", [adamw, sgd, momentum])
@pytest.mark.parametrize("loop", ORDINARY, ids=lambda loop: loop.__name__)
def test_an_ordinary_loop_is_never_named(loop, make, caplog):
    with caplog.at_level(logging.WARNING, logger="collage_agent"):
        going = Loop(make)
        loop(going)
    assert "call no hook" not in caplog.text + str(going.handle)
    assert going.handle.step


def test_a_graph_after_an_ordinary_loop_is_named():
    """The loops of the table are looked at: what follows each of them would be found."""
    going = Loop(adamw)
    for loop in (evaluates, swaps_an_average, accumulates):
        loop(going)
    states = [value for state in going.optimizer.state.values() for value in state.values()]
    memory = [*(parameter.detach() for parameter in going.model.parameters()), *states]
    graph = OptimizerCudaGraphWrapper(going.optimizer.step, lambda: memory, cuda_graph_warmup_steps=0)
    for _ in range(6):
        going.optimizer.zero_grad(set_to_none=False)
        going.backward()
        graph()
        going.handle.look()
    assert "call no hook" in str(going.handle)
