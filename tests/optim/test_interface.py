"""The optimizer as users meet it: construction, groups, schedulers, closures, hooks and errors, as in torch."""

import importlib

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD

from tests.forking import TORCH, run_forked
from tests.optim.models import assert_same_bits, give_gradients, parameters, train, train_each, walk

BAD_OPTIONS = [
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"strategy": "heavy"}, "Invalid strategy: 'heavy'; use one of plain"),
    ({"arithmetic": "fp8"}, "Invalid arithmetic: 'fp8'; use one of fp32, storage"),
    *(
        ({form: True}, f"{form}=True is not supported")
        for form in ("foreach", "fused", "capturable", "differentiable")
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[message for _, message in BAD_OPTIONS])
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CollageAdamW(parameters(), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", -1.0), ("eps", -1.0), ("weight_decay", -1.0), ("lr", torch.tensor([1.0, 2.0]))),
        *(("betas", (1.5, 0.9)), ("betas", (0.9, 1.0)), ("betas", (0.9, -0.1))),
    ],
)
def test_errors_in_the_words_of_torch(name, value):
    words = []
    for kind in (torch.optim.AdamW, CollageAdamW):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            kind(parameters(), **{name: value})
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_torch_options_that_ask_for_nothing_are_accepted_and_unknown_ones_named():
    CollageAdamW(parameters(), foreach=None, fused=False, capturable=False, differentiable=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        CollageAdamW(parameters(), learning_rate=1e-3)  # type: ignore[call-arg]


def test_wrong_parameters_are_refused():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        CollageAdamW([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        CollageAdamW(torch.zeros(3, requires_grad=True))
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        CollageAdamW([parameters()[0] * 2])
    with pytest.raises(ValueError, match=r"complex parameters.*view_as_real"):
        CollageAdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    members = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    with pytest.raises(ValueError, match=r"not torch\.float32: put these parameters into a group of their own"):
        CollageAdamW(members)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "plain"])
def test_fp32_parameters_are_for_plain(strategy):
    with pytest.raises(ValueError, match=f"'{strategy}' is for bfloat16.*torch.float32.*strategy='plain'"):
        CollageAdamW(parameters(torch.float32), strategy=strategy)


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    optimizer = CollageAdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam"):
        optimizer.step()


def test_a_refused_group_is_not_added():
    optimizer = CollageAdamW(parameters())
    with pytest.raises(ValueError, match="Invalid strategy"):
        optimizer.add_param_group({"params": parameters(seed=2), "strategy": "none"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("dtype", "options", "strategy"),
    [
        (torch.bfloat16, {}, "split-master"),
        (torch.float16, {}, "master-weights"),
        (torch.float32, {}, "plain"),
        (torch.float64, {"arithmetic": "storage"}, "plain"),
        (torch.bfloat16, {"arithmetic": "storage"}, None),
    ],
)
@pytest.mark.parametrize("kind", [CollageAdamW, CollageLion, CollageSGD])
def test_the_default_strategy_is_the_one_that_is_advised_for_the_dtype(kind, dtype, options, strategy):
    """It was `plus`, which advice never names, and which refused fp32 weights."""
    member = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    other = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([member], **options)
    optimizer.add_param_group({"params": [other]})
    published = "plus" if kind is CollageAdamW else "light"
    assert [group["strategy"] for group in optimizer.param_groups] == [strategy or published, "plain"]
    optimizer = kind.from_optimizer(optimizer, **options)
    assert [group["strategy"] for group in optimizer.param_groups] == [strategy or published, "plain"]
    assert (walk(optimizer, 1.0) < 1).all()


def test_groups_may_differ_in_strategy():
    members, plain = parameters(), parameters(torch.float32, seed=2)
    optimizer = CollageAdamW(members, strategy="plus")
    optimizer.add_param_group({"params": plain, "strategy": "plain", "lr": 1e-2})
    train(optimizer, members + plain, 3)
    assert "parameter_low" in optimizer.state[members[0]]
    assert "parameter_low" not in optimizer.state[plain[0]]
    assert optimizer.strategy == "plus"


def beside_torch(groups=lambda members: members):
    """torch's AdamW, and ours in storage arithmetic, which has its bits."""
    ours = CollageAdamW(groups(parameters()), strategy="plain", arithmetic="storage")
    return torch.optim.AdamW(groups(parameters()), foreach=False), ours


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20),
    ],
)
def test_schedulers_drive_the_learning_rate(scheduler):
    both = beside_torch()
    schedulers = [scheduler(own) for own in both]
    for step in range(8):
        train_each(both, 1, first=step)
        for driving in schedulers:
            driving.step()
    assert both[0].param_groups[0]["lr"] == both[1].param_groups[0]["lr"]
    assert_same_bits(*both)


def test_closures_are_evaluated_with_gradients_and_step_hooks_fire_once():
    weight, calls = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), []
    optimizer = CollageAdamW([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses[0] == 4
    assert losses == sorted(losses, reverse=True)
    assert calls == ["before", "after"] * 5


@pytest.mark.parametrize("strategy", ["plus", "stochastic"])
def test_empty_parameters_are_stepped(strategy):
    empty = torch.nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))
    optimizer = CollageAdamW([empty], strategy=strategy)
    train(optimizer, [empty], 2)
    assert optimizer.stored_parameter(empty).shape == (0, 4)


def test_parameters_without_gradient_and_the_random_numbers_of_the_training_are_left_alone():
    members = parameters()
    before = members[0].detach().clone()
    optimizer = CollageAdamW(members)
    give_gradients(members[1:], step=1)
    state = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(members[0], before)
    assert members[0] not in optimizer.state


def test_options_by_group():
    apart = {"lr": 1e-2, "weight_decay": 0.5}, {"eps": 1e-4}
    both = beside_torch(lambda members: [{"params": members[:2], **apart[0]}, {"params": members[2:], **apart[1]}])
    train_each(both, 10)
    assert_same_bits(*both)


@pytest.mark.parametrize(
    ("name", "product"),
    [("collage_agent.optim", "collage_optim"), ("collage_agent.numerics", "collage_optim.numerics")],
)
def test_the_agent_offers_the_same_objects_under_its_own_name(name, product):
    offered, own = importlib.import_module(name), importlib.import_module(product)
    assert offered.__all__ == own.__all__
    assert all(getattr(offered, member) is getattr(own, member) for member in own.__all__)


LOADED = """
import sys, collage_optim
watched = "collage_agent", "collage_monitor", "collage_server", "httpx", "msgspec"
print(*sorted(name for name in sys.modules if name.partition(".")[0] in watched))
"""


@pytest.mark.slow
def test_the_optimizers_load_nothing_else_of_the_project():
    done = run_forked(TORCH, "-c", LOADED)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
