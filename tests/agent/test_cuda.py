"""The agent on a CUDA device: training stays bit-identical, nothing waits, and the numbers are the host's."""

import copy
import math
import subprocess
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.sample.sampling import draw
from collage_agent.step.gather import BlockLayout, Source, Staging
from collage_agent.transport import MemoryTransport
from collage_optim import STRATEGIES, CollageAdamW

from tests.agent.step.test_measurer import totals_of
from tests.agent.training import adamw, mlp, train
from tests.agent.training import watched as begun
from tests.agent.watching.test_average_watch import announced, assert_told, in_fp64
from tests.optim.models import give_gradients, parameters, tensors_of
from tests.optim.with_triton import assert_same_sums
from tests.reference.averages import ReferenceAverage
from tests.waiting import until

pytestmark = pytest.mark.gpu

NEAREST = [name for name, strategy in STRATEGIES.items() if not strategy.stochastic]
OPTIMIZERS: dict[str, Any] = {
    "AdamW for-loop": partial(adamw, foreach=False),
    "AdamW foreach": partial(adamw, foreach=True),
    "AdamW fused": partial(adamw, fused=True),
    "AdamW capturable": lambda p: adamw(p, lr=torch.tensor(1e-3, device="cuda"), capturable=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "plus": partial(CollageAdamW, lr=1e-3, strategy="plus"),
    "split-master": partial(CollageAdamW, lr=1e-3, strategy="split-master", seed=1),
    "plus compiled": partial(CollageAdamW, lr=1e-3, strategy="plus", compiled=True),
}
WATCHING: dict[str, Any] = {"every": 1, "sample": 512, "oracle": True, "windows": (2,), "budget": None}


def device_loss(model, step):
    """Inputs are drawn on the host, so that they are the same however often a run is repeated."""
    generator = torch.Generator().manual_seed(2000 + step)
    x = torch.randn(16, 30, generator=generator).to("cuda", torch.bfloat16)
    return (model(x).float() - 1.0).square().mean()


def trained(name, watched, steps=20):
    model = mlp().cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = watch(model, optimizer, **WATCHING, casts=("bf16", "fp8_tensor")) if watched else None
    losses = train(model, optimizer, steps, device_loss)
    if handle is not None:
        summary = handle.summary()
        assert summary["step"] == steps
        assert summary["model"]["edq_ratio"] is not None, handle.info.intent_reason
    return losses, [tensor.cpu() for tensor in tensors_of(optimizer).values()], torch.cuda.get_rng_state()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_with_and_without_the_agent(name):
    (losses, tensors, state), (others, found, other_state) = trained(name, False), trained(name, True)
    assert losses == others
    assert torch.equal(state, other_state)
    for one, other in zip(tensors, found, strict=True):
        assert torch.equal(one, other)


def test_a_kernel_gathers_the_bits_that_are_gathered_tensor_by_tensor():
    kinds = (torch.bfloat16, torch.float32)
    columns = [[torch.randn(size, device="cuda").to(kind) for size in (9001, 4096, 7, 1)] for kind in kinds]
    samples = [draw(str(place), tensor.numel(), 2, 512) for place, tensor in enumerate(columns[0])]
    layout = BlockLayout(samples, columns[0])
    launched, copied = (
        [Source(own, Staging(layout, kind), False) for own, kind in zip(columns, kinds, strict=True)]
        for _ in range(2)
    )
    until(lambda: all(layout.launch(launched)))
    for own, beside in zip(copied, launched, strict=True):
        layout._copy(*own)
        assert torch.equal(own.staging.values, beside.staging.values)


FIRST_WATCH = """
import torch
from collage_agent.handle import watch
model = torch.nn.Linear(64, 64, dtype=torch.bfloat16, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
handle = watch(model, optimizer, every=1, budget=None)
for _ in range(2):
    model(torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
print(handle.summary()["model"]["edq_ratio"], handle.info.intent_reason)
"""


def test_the_first_watch_of_a_process_knows_what_was_intended():
    """CUDA warns of its own doing when it is first asked to say who waits."""
    found = subprocess.run([sys.executable, "-c", FIRST_WATCH], capture_output=True, text=True, check=True)
    assert not found.stdout.startswith("None"), found.stdout


@pytest.mark.parametrize("strategy", NEAREST)
def test_the_numbers_are_those_of_the_host(strategy):
    """Steps have the same bits on both, so every statistic is the same, but for the order of fp64 sums."""
    found = []
    for device in ("cpu", "cuda"):
        members = [torch.nn.Parameter(member.detach().to(device)) for member in parameters()]
        model = torch.nn.Module()
        for index, member in enumerate(members):
            model.register_parameter(f"weight{index}", member)
        optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy)
        handle = watch(model, optimizer, **WATCHING, casts=("bf16", "fp8_tensor", "fp8_block128", "nvfp4_2d"))
        for step in range(1, 9):
            give_gradients(members, step=step)
            optimizer.step()
        found.append(handle.summary())
    host, there = found
    assert host["model"].keys() == there["model"].keys()
    assert host["model"]["edq_window_ratio/2"] is not None
    for mine, theirs in [(host["model"], there["model"]), *zip_layers(host, there)]:
        for key, value in mine.items():
            # The error's square is a difference of sums, which fp64 knows to 1e-16 of the whole.
            least = 1e-8 if key == "update_error_ratio" else 1e-15
            assert theirs[key] == (value if value is None else pytest.approx(value, rel=1e-9, abs=least)), key


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_add_up_the_totals_of_every_element_and_nothing_waits(strategy):
    """Beside a whole sample of the same steps, taken eagerly, after a gradient that is not finite, too."""
    shapes = ((300, 70), (7,), (1,), (10_007,))
    found: list[dict[str, Any]] = []
    waits: list[warnings.WarningMessage] = []
    forms: tuple[Any, ...] = ((None, {"sample": 512, "casts": ()}), (False, {"sample": "all"}))
    for form, options in forms:
        members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters(shapes=shapes)]
        optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy, compiled=form, seed=7)
        handle = watch(torch.nn.ParameterList(members), optimizer, every=1, budget=None, **options)
        for step in range(4):
            give_gradients(members, step=step)
            torch.as_tensor(members[0].grad)[0, :step] = torch.nan
            with waiting_is_listened_to() as waited:
                optimizer.step()
            waits += waited if step > 1 and form is None else []
        found.append(totals_of(handle))
    assert [str(wait.message) for wait in waits if "synchronizing" in str(wait.message)] == []
    for name, totals in found[0].items():
        assert totals["sampled"] == totals["elements"]
        own = {key: float(value) for key, value in totals.items() if not math.isnan(value)}
        assert len(own) >= 28
        assert_same_sums(own, found[1][name], (strategy, name))


def zip_layers(host, device):
    return [(host["layers"][name], device["layers"][name]) for name in host["layers"]]


@contextmanager
def waiting_is_listened_to():
    """Collects a warning for each time that this process waits for the device."""
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_measured_steps_wait_for_nothing(name):
    model, optimizer, handle = begun(OPTIMIZERS[name], mlp().cuda(), 3, device_loss, **WATCHING)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-2)
    with waiting_is_listened_to() as waited:
        for _ in range(4):
            optimizer.step()
    places = {f"{place.filename}:{place.lineno}" for place in waited if "synchronizing" in str(place.message)}
    assert places == set()
    assert handle.summary()["step"] == 7


def test_a_loss_scaler_s_skipped_steps_are_counted():
    model, optimizer, handle = begun(partial(adamw, fused=True), mlp(dtype=torch.float32).cuda())
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(step)).cuda()
        scaler.scale(model(x).square().mean()).backward()
        if step == 3:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert handle.summary()["model"]["skipped_steps"] == 1


def test_a_measured_step_is_delivered_while_the_device_is_busy(tmp_path):
    transport = MemoryTransport()
    run = collage.init(transport=transport, dir=tmp_path)
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    collage.watch(model, optimizer, every=1, budget=None)
    train(model, optimizer, 3, device_loss)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    optimizer.step()
    assert not torch.cuda.current_stream().query()
    run.finish()
    assert [report.step for report in transport.reports if report.statistics is not None] == [1, 2, 3, 4]


def captured_training(watched):
    """Ten replays of a step that a CUDA graph has recorded, after three eager ones."""
    members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
    model = torch.nn.ParameterList(members)
    optimizer = torch.optim.AdamW(members, lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    handle = watch(model, optimizer, **WATCHING) if watched else None
    give_gradients(members, step=0)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(10):
        graph.replay()
    return handle, [tensor.cpu() for tensor in tensors_of(optimizer).values()]


def test_a_step_in_a_cuda_graph_is_left_alone_and_said_not_to_be_seen(caplog):
    _, tensors = captured_training(watched=False)
    handle, found = captured_training(watched=True)
    for one, other in zip(tensors, found, strict=True):
        assert torch.equal(one, other)
    assert handle.summary()["step"] == 3
    assert "by a CUDA graph that replays them" in handle.info.intent_reason
    assert "by a CUDA graph that replays them" in caplog.text


def averaged(average_dtype, steps=12):
    """A training whose average is watched; the watch, what the references say at last, where it waited."""
    model = mlp().cuda()
    average = copy.deepcopy(model).to(average_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    handle = collage.watch_average(average, model, 0.99, every=1, sample="all")
    references = {name: ReferenceAverage(own) for name, own in average.named_parameters()}
    waits: list[list[warnings.WarningMessage]] = []

    def updates():
        with waiting_is_listened_to() as waited:
            announced([handle], average, model, 0.99)
        waits.append(waited)

    for step in range(steps):
        train(model, optimizer, 1, device_loss, start=step)
        found = in_fp64(references, average, model, 0.99, updates)
    # The first update prepares what the others use.
    return handle, found, [wait for waited in waits[1:] for wait in waited]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_average_s_numbers_are_those_of_an_fp64_average_and_nothing_waits(dtype):
    handle, found, waits = averaged(dtype)
    assert_told(handle, found)
    assert [str(wait.message) for wait in waits if "synchronizing" in str(wait.message)] == []


def launched(folder, name, checkpoint=None, spoil=None, **options):
    """Three steps of a launch that goes on from a checkpoint; its watch, and the checkpoint that it leaves."""
    model = mlp().cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    start = 0
    if checkpoint is not None:
        start, weights, states = copy.deepcopy(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
    if spoil is not None:
        spoil(model, optimizer)
    collage.init("device", run_id=name.replace(" ", "-"), mode="offline", dir=folder)
    handle = collage.watch(model, optimizer, every=1, budget=None, first_step=start + 1, **options)
    train(model, optimizer, 3, device_loss, start=start)
    collage.finish()
    return handle, (start + 3, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))


def one_layer_made_anew(model, _):
    model[2].reset_parameters()


def averages_emptied(_, optimizer):
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_low", "momentum_buffer"):
            if key in state:
                state[key].zero_()


RESUMED = [name for name in OPTIMIZERS if "compiled" not in name]


@pytest.mark.parametrize("name", RESUMED)
def test_a_launch_knows_whether_all_came_back_bit_for_bit(name, tmp_path):
    _, checkpoint = launched(tmp_path, name)
    handle, checkpoint = launched(tmp_path, name, checkpoint)
    assert "bit for bit" in str(handle.info.continuation)
    assert handle.info.resume_losses == []
    handle, checkpoint = launched(tmp_path, name, checkpoint, one_layer_made_anew)
    assert sorted(handle.info.continuation.weights.layers) == ["2.bias", "2.weight"]
    handle, _ = launched(tmp_path, name, checkpoint, averages_emptied)
    assert handle.info.continuation.states.differing


@pytest.mark.parametrize(
    ("name", "kept"), [("AdamW fused", "plain"), ("plus", "plus"), ("split-master", "split-master")]
)
def test_what_is_kept_is_held_to_what_was_expected_at_the_first_step(name, kept, tmp_path):
    handle, checkpoint = launched(tmp_path, name, expect={"strategy": kept})
    assert handle.info.broken == []
    handle, _ = launched(tmp_path, name, checkpoint, expect="master-weights")
    assert [(breach.expectation, breach.step) for breach in handle.info.broken] == [("strategy", 4)]
