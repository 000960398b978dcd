"""The CUDA lane: vectors, parity and strategies on a device, against the same on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD, numerics

from tests.numerics.bits import finite_patterns, from_bits, to_hexadecimal
from tests.optim.models import assert_same_bits, give_gradients, parameters, tensors_of

pytestmark = pytest.mark.gpu

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text(encoding="utf-8"))
WITHOUT_SECOND = [name for name in STRATEGIES if name not in ("plus", "coupled-9", "coupled-8", "coupled-7")]
PAIRS = [
    *((name, CollageAdamW, {}) for name in STRATEGIES),
    *((name, CollageLion, {}) for name in WITHOUT_SECOND),
    *((name, CollageSGD, {"momentum": 0.9}) for name in WITHOUT_SECOND),
]
NEAREST = [name for name, strategy in STRATEGIES.items() if not strategy.stochastic]


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
    here = parameters()
    there = [torch.nn.Parameter(member.detach().cuda()) for member in here]
    optimizers = CollageAdamW(here, strategy=strategy), CollageAdamW(there, strategy=strategy)
    for step in range(20):
        give_gradients(here, step=step)
        for member, other in zip(here, there, strict=True):
            other.grad = None if member.grad is None else member.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    found = tensors_of(optimizers[1])
    for key, tensor in tensors_of(optimizers[0]).items():
        assert torch.equal(found[key].cpu(), tensor), key


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("strategy", "kind", "options"), PAIRS)
def test_the_kernel_is_used_by_default_and_has_the_eager_steps_bits(strategy, kind, options):
    """Of tensors that are stepped together, and of one that is too long for that."""
    shapes = ((300, 70), (7,), (1,), (10_007,), (0,), (1_500, 1_501))
    pairs = []
    for form in (False, None):
        members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters(shapes=shapes)]
        pairs.append((members, kind(members, strategy=strategy, compiled=form, seed=7, **options)))
    for step in range(5):
        for members, optimizer in pairs:
            give_gradients(members, step=step)
            optimizer.step()
    assert_same_bits(*(optimizer for _, optimizer in pairs))


def test_a_kernel_waits_for_nothing():
    """Once it is built: its tables and numbers go to the device behind the work that is queued there."""
    members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
    optimizer = CollageAdamW(members, strategy="split-master-8bit", seed=7)
    for step in range(4):
        give_gradients(members, step=step)
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["plus", "split-master-8bit"])
def test_a_loss_scaler_waits_for_nothing_and_the_bits_are_those_of_unscaled_gradients(strategy):
    pairs, scalers = [], []
    for fused in (False, True):
        members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
        rate = torch.tensor(1e-3, device="cuda")
        pairs.append((members, CollageAdamW(members, lr=rate, strategy=strategy, seed=7, fused=fused)))
        scalers.append(torch.amp.GradScaler("cuda", init_scale=3.0 * 2**10))
    for step in range(5):
        for (members, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.scale(torch.ones((), device="cuda"))
            give_gradients(members, step=step, scale=30.0)
            if step == 3:
                gradient: Any = members[0].grad
                gradient.view(-1)[:1] = torch.inf
            waits = step == 0 or not optimizer._step_supports_amp_scaling
            torch.cuda.set_sync_debug_mode("default" if waits else "error")
            try:
                scaler.step(optimizer)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            scaler.update(3.0 * 2**10)
    eager, counted = (optimizer for _, optimizer in pairs)
    for one, other in zip(*(own for own, _ in pairs), strict=True):
        states = eager.state[one], counted.state[other]
        assert states[0]["step"].item() == states[1]["step"].item() == 4
        states[1]["step"] = states[1]["step"].cpu()
    assert_same_bits(eager, counted)


@pytest.mark.parametrize("strategy", ["plus", "split-master-8bit"])
def test_replays_of_a_graph_have_the_bits_of_eager_steps(strategy):
    pairs = []
    forms: list[dict[str, Any]] = [{"compiled": False}, {"capturable": True}]
    for options in forms:
        members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
        rate = torch.tensor(1e-3, device="cuda")
        pairs.append((members, CollageAdamW(members, lr=rate, strategy=strategy, seed=7, **options)))
        give_gradients(members, step=0)
        pairs[-1][1].step()
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
    for one, other in zip(members, captured, strict=True):
        assert eager.state[one]["step"].item() == counted.state[other]["step"].item() == 5
        counted.state[other]["step"] = counted.state[other]["step"].cpu()
    assert_same_bits(eager, counted)


@pytest.mark.parametrize("strategy", ["plus", "split-master"])
def test_writes_on_the_device_are_seen_without_waiting(strategy):
    """One in place; the same bits in other memory are none."""
    members = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
    optimizer = CollageAdamW(members, strategy=strategy)
    for step in range(6):
        give_gradients(members, step=step)
        if step == 3:
            with torch.no_grad():
                members[0].zero_()
            members[1].data = members[1].data.clone()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert optimizer.external_writes == 1
    assert optimizer.stored_parameter(members[0]).abs().max() < 0.1


def test_plain_in_storage_arithmetic_is_torch_on_the_device():
    ours = [torch.nn.Parameter(member.detach().cuda()) for member in parameters()]
    theirs = [torch.nn.Parameter(member.detach().clone()) for member in ours]
    optimizer = CollageAdamW(ours, strategy="plain", arithmetic="storage")
    reference = torch.optim.AdamW(theirs, foreach=False)
    for step in range(20):
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
