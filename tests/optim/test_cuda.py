"""The CUDA lane: vectors, parity and strategies on a device, against the same on the CPU."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD, numerics

from tests.numerics.bits import finite_patterns, from_bits, to_hexadecimal
from tests.optim.models import SHAPES, assert_same_bits, give_gradients, parameters, tensors_of, train, train_each

pytestmark = pytest.mark.gpu

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text(encoding="utf-8"))
WITHOUT_SECOND = [name for name in STRATEGIES if name not in ("plus", "coupled-9", "coupled-8", "coupled-7")]
PAIRS = [
    *((name, CollageAdamW, {}) for name in STRATEGIES),
    *((name, CollageLion, {}) for name in WITHOUT_SECOND),
    *((name, CollageSGD, {"momentum": 0.9}) for name in WITHOUT_SECOND),
]
NEAREST = [name for name, strategy in STRATEGIES.items() if not strategy.stochastic]


def on_device(shapes=SHAPES):
    return [torch.nn.Parameter(member.detach().cuda()) for member in parameters(shapes=shapes)]


@contextmanager
def waiting(allowed):
    """Where it is not allowed, what waits for the device raises."""
    torch.cuda.set_sync_debug_mode("default" if allowed else "error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same_but_for_counters_places(eager, counted, *, steps):
    """Counters of steps that a device counts lie there."""
    for one, other in zip(*(own.param_groups[0]["params"] for own in (eager, counted)), strict=True):
        assert eager.state[one]["step"].item() == counted.state[other]["step"].item() == steps
        counted.state[other]["step"] = counted.state[other]["step"].cpu()
    assert_same_bits(eager, counted)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['operation']}-{vector['note']}")
def test_vector_on_the_device(vector):
    dtype = getattr(torch, vector["dtype"])
    operands = [from_bits([pattern], dtype).cuda() for pattern in vector["inputs"]]
    results = getattr(numerics, vector["operation"])(*operands)
    assert to_hexadecimal(*(result.cpu() for result in results)) == vector["outputs"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gaps_and_rounding_on_the_device(dtype):
    x = finite_patterns(dtype)
    direction = torch.ones(x.numel())
    assert torch.equal(numerics.ulp(x.cuda()).cpu(), numerics.ulp(x))
    assert torch.equal(numerics.gap_towards(x.cuda(), direction.cuda()).cpu(), numerics.gap_towards(x, direction))
    between = x.double() + numerics.ulp(x).double() * 0.5000001
    assert torch.equal(numerics.round_to(between.cuda(), dtype).cpu(), numerics.round_to(between, dtype))


@pytest.mark.parametrize("strategy", NEAREST)
def test_device_and_cpu_give_the_same_bits(strategy):
    """Sums, products, quotients and the fp64 root are rounded correctly on both."""
    optimizers = [CollageAdamW(members, strategy=strategy) for members in (parameters(), on_device())]
    train_each(optimizers, 20)
    found = tensors_of(optimizers[1])
    for key, tensor in tensors_of(optimizers[0]).items():
        assert torch.equal(found[key].cpu(), tensor), key


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("strategy", "kind", "options"), PAIRS)
def test_the_kernel_is_used_by_default_and_has_the_eager_steps_bits(strategy, kind, options):
    """Of tensors that are stepped together, and of one that is too long for that."""
    shapes = ((300, 70), (7,), (1,), (10_007,), (0,), (1_500, 1_501))
    optimizers = [
        kind(on_device(shapes), strategy=strategy, compiled=form, seed=7, **options) for form in (False, None)
    ]
    train_each(optimizers, 5)
    assert_same_bits(*optimizers)


def test_a_kernel_waits_for_nothing():
    """Once it is built: its tables and numbers go to the device behind the work that is queued there."""
    optimizer = CollageAdamW(members := on_device(), strategy="split-master-8bit", seed=7)
    for step in range(4):
        give_gradients(members, step=step)
        with waiting(allowed=step == 0):
            optimizer.step()


@pytest.mark.parametrize("strategy", ["plus", "split-master-8bit"])
def test_a_loss_scaler_waits_for_nothing_and_the_bits_are_those_of_unscaled_gradients(strategy):
    pairs, scalers = [], []
    for fused in (False, True):
        members, rate = on_device(), torch.tensor(1e-3, device="cuda")
        pairs.append((members, CollageAdamW(members, lr=rate, strategy=strategy, seed=7, fused=fused)))
        scalers.append(torch.amp.GradScaler("cuda", init_scale=3.0 * 2**10))
    for step in range(5):
        for (members, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.scale(torch.ones((), device="cuda"))
            give_gradients(members, step=step, scale=30.0)
            if step == 3:
                gradient: Any = members[0].grad
                gradient.view(-1)[:1] = torch.inf
            with waiting(allowed=step == 0 or not optimizer._step_supports_amp_scaling):
                scaler.step(optimizer)
            scaler.update(3.0 * 2**10)
    assert_same_but_for_counters_places(*(optimizer for _, optimizer in pairs), steps=4)


@pytest.mark.parametrize("strategy", ["plus", "split-master-8bit"])
def test_replays_of_a_graph_have_the_bits_of_eager_steps(strategy):
    pairs = []
    forms: list[dict[str, Any]] = [{"compiled": False}, {"capturable": True}]
    for options in forms:
        members, rate = on_device(), torch.tensor(1e-3, device="cuda")
        pairs.append((members, CollageAdamW(members, lr=rate, strategy=strategy, seed=7, **options)))
        train(pairs[-1][1], members, 1, first=0)
    (members, eager), (captured, counted) = pairs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted.step()
    for step in range(1, 5):
        give_gradients(members, step=step)
        for one, other in zip(members, captured, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            other.grad.copy_(one.grad)
        for optimizer in (eager, counted):
            optimizer.param_groups[0]["lr"].mul_(0.75)
        eager.step()
        graph.replay()
    assert_same_but_for_counters_places(eager, counted, steps=5)


@pytest.mark.parametrize("strategy", ["plus", "split-master"])
def test_writes_on_the_device_are_seen_without_waiting(strategy):
    """One in place; the same bits in other memory are none."""
    optimizer = CollageAdamW(members := on_device(), strategy=strategy)
    for step in range(6):
        give_gradients(members, step=step)
        if step == 3:
            with torch.no_grad():
                members[0].zero_()
            members[1].data = members[1].data.clone()
        with waiting(allowed=step == 0):
            optimizer.step()
        torch.cuda.synchronize()
    assert optimizer.external_writes == 1
    assert optimizer.stored_parameter(members[0]).abs().max() < 0.1


def test_plain_in_storage_arithmetic_is_torch_on_the_device():
    ours, theirs = on_device(), on_device()
    optimizer = CollageAdamW(ours, strategy="plain", arithmetic="storage")
    train_each((optimizer, torch.optim.AdamW(theirs, foreach=False)), 20)
    assert all(map(torch.equal, ours, theirs))
