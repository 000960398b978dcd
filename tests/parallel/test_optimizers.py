"""Our optimizers under `fully_shard`: two processes hold together, bit for bit, what one process holds."""

import copy
import functools
from typing import Any

import pytest
import torch
from collage_optim import CollageAdamW, CollageLion, CollageSGD
from collage_optim.random_numbers import shard_number

from tests.parallel.launch import among_asked, asked, launch
from tests.parallel.models import fsdp2, injected

pytestmark = pytest.mark.slow

STEPS = 4
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plus": (CollageAdamW, {"strategy": "plus"}),
    "full, amsgrad": (CollageAdamW, {"strategy": "full", "amsgrad": True}),
    "master-weights": (CollageAdamW, {"strategy": "master-weights"}),
    "split-master, stochastic": (CollageAdamW, {"strategy": "split-master"}),
    "split-master-16bit, stochastic": (CollageAdamW, {"strategy": "split-master-16bit"}),
    "fp32-states": (CollageAdamW, {"strategy": "fp32-states"}),
    "plus, storage": (CollageAdamW, {"strategy": "plus", "arithmetic": "storage"}),
    "plain, storage": (CollageAdamW, {"strategy": "plain", "arithmetic": "storage"}),
    "plain, storage, SGD": (CollageSGD, {"strategy": "plain", "arithmetic": "storage", "momentum": 0.9}),
    "kahan, Lion": (CollageLion, {"strategy": "kahan", "weight_decay": 0.1}),
    "light-stochastic": (CollageAdamW, {"strategy": "light-stochastic"}),
    "light-stochastic, storage": (CollageAdamW, {"strategy": "light-stochastic", "arithmetic": "storage"}),
}


def whole(tensor):
    if not hasattr(tensor, "full_tensor"):
        return tensor
    # gloo does not send 16-bit integers.
    return (
        tensor.to(torch.int32).full_tensor().to(torch.int16)
        if tensor.dtype == torch.int16
        else tensor.full_tensor()
    )


def stepped(model, optimizer, steps, first=1):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def held(model, optimizer):
    """Every tensor of every parameter, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name, "parameter"] = whole(parameter.detach())
        found[name, "stored"] = whole(optimizer.stored_parameter(parameter))
        found.update({(name, key): whole(value) for key, value in optimizer.state[parameter].items()})
    return found


def stepped_shards(folder):
    """Of each optimizer asked for: what the ranks hold, also when resumed half-way, and what one process holds."""
    seen = {}
    for name, (maker, options) in among_asked(MAKERS).items():
        make = functools.partial(maker, lr=2**-9, **options)
        model, optimizer = fsdp2(torch.bfloat16, make=make)
        stepped(model, optimizer, STEPS)
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        stepped(model, optimizer, STEPS, first=STEPS + 1)

        other, resumed = fsdp2(torch.bfloat16, make=functools.partial(make, lr=1.0))
        other.load_state_dict(checkpoint[0])
        resumed.load_state_dict(checkpoint[1])
        stepped(other, resumed, STEPS, first=STEPS + 1)

        alone = injected(torch.bfloat16)
        single = make(alone.parameters())
        stepped(alone, single, 2 * STEPS)
        seen[name] = held(model, optimizer), held(other, resumed), held(alone, single)
    return seen, shard_number(next(model.parameters())), shard_number(next(alone.parameters()))


ULP = 2.0**-7
BY_DAY = ("full, amsgrad", "split-master, stochastic", "kahan, Lion", "light-stochastic, storage")


def of_each(test, **only):
    """Some of the optimizers by day, which keep and round in all ways, and all at night."""
    names = [name for name in MAKERS if all((word in name) == wanted for word, wanted in only.items())]
    marked = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names]
    return pytest.mark.parametrize("name", marked)(test)


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launch(
        "test_optimizers.stepped_shards", 2, tmp_path_factory.mktemp("shards"), ASKED=asked(request, "name")
    )


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@functools.partial(of_each, stochastic=False)
def test_shards_step_like_one_process(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        assert differing(shards, alone) == []


@of_each
def test_shards_resume_bit_for_bit(name, ranks):
    for seen, _, _ in ranks:
        shards, resumed, _ = seen[name]
        assert differing(resumed, shards) == []


@functools.partial(of_each, stochastic=True)
def test_random_rounding_of_shards_stays_within_an_ulp_and_differs_between_ranks(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        for key in alone:
            if key[1] == "parameter":
                torch.testing.assert_close(shards[key].double(), alone[key].double(), rtol=ULP, atol=2.0**-14)
    assert [(of_shard, of_plain) for _, of_shard, of_plain in ranks] == [(0, 0), (1, 0)]
