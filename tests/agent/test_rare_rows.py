"""Embeddings of which a step uses few rows: sparse gradients are measured where they touch, or not at all."""

import math
from functools import partial

import pytest
import torch
from collage_agent.step.gather import BlockLayout
from collage_agent.step.touched_rows import TouchedRows
from torch import nn

from tests.agent.step.test_measurer import totals_of
from tests.agent.training import adamw, mean_square, train, watched

ROWS, WIDTH = 2_000, 50
OPTIMIZERS = {
    "SparseAdam": partial(torch.optim.SparseAdam, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def embedding(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
    nn.init.normal_(model.weight, std=0.02)
    return model


def backward(model, step, uses=64):
    """A gradient of `uses` rows, nine of them used twice."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, ROWS, (uses,), generator=generator)
    rows = torch.cat([rows, rows[:9]])
    model.zero_grad()
    (model(rows).float() * torch.randn(len(rows), WIDTH, generator=generator)).sum().backward()
    return rows.unique()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sample", [4096, "all"])
def test_all_rows_that_a_sparse_step_touches_are_measured(name, sample):
    model, optimizer, handle = watched(OPTIMIZERS[name], embedding(), sample=sample, windows=(2,))
    for step in range(4):
        touched = backward(model, step)
        before = model.weight.detach().double()
        gradient = model.weight.grad.coalesce().to_dense().double()
        optimizer.step()
    effective = model.weight.detach().double() - before
    totals = totals_of(handle)["weight"]
    assert handle.info.intent == "shadow"
    assert totals["elements"] == ROWS * WIDTH
    assert math.isnan(totals["parameter_squared_sum"]), "touched rows say nothing of all weights"
    assert totals["sampled"] == len(touched) * WIDTH
    assert totals["idle"] == (ROWS - len(touched)) * WIDTH
    assert totals["unchanged"] == (effective == 0).sum()
    assert totals["effective_squared_sum"] == pytest.approx(float(effective.square().sum()), rel=1e-9)
    assert totals["gradient_squared_sum"] == pytest.approx(float(gradient.square().sum()), rel=1e-9)
    assert totals["intended_effective_sum"] == pytest.approx(totals["intended_squared_sum"], rel=1e-4)
    if name == "SGD":
        assert totals["intended_squared_sum"] == pytest.approx(float((1e-3 * gradient).square().sum()), rel=1e-9)


@pytest.mark.slow
def test_a_sample_of_the_touched_rows_stands_for_them():
    found, given = [], 0
    for seed in range(40):
        sgd = partial(torch.optim.SGD, lr=3e-5)
        model, optimizer, handle = watched(sgd, embedding(torch.bfloat16), sample=2048, seed=seed)
        backward(model, 1, uses=400)
        before = model.weight.detach().double()
        intended = -3e-5 * model.weight.grad.coalesce().to_dense().double()
        optimizer.step()
        values, totals = handle.summary()["model"], totals_of(handle)["weight"]
        found.append((totals["intended_squared_sum"], values["lost_update_ratio"]))
        given += values["edq_ratio_low"] is not None
        assert totals["sampled"] < 2048
    lost = ((model.weight.detach().double() == before) & (intended != 0)).sum() / (intended != 0).sum()
    squares, shares = zip(*found, strict=True)
    assert sum(squares) / 40 == pytest.approx(float(intended.square().sum()), rel=0.02)
    assert sum(shares) / 40 == pytest.approx(float(lost), rel=0.02)
    assert len(set(squares)) == 40
    assert given >= 36


@pytest.mark.parametrize(("uses", "count"), [(3, 64), (64, 64), (200, 16)])
def test_every_touched_row_gives_as_many_blocks(uses, count):
    """A row that is no whole number of blocks wide ends with a shorter one."""
    model = embedding()
    rows = backward(model, 0, uses)
    gradient = model.weight.grad
    for form in (gradient, gradient.coalesce()):
        chosen = TouchedRows(form, count, 16, seed=3)
        seen = (chosen.index // WIDTH)[chosen.held]
        assert set(seen.tolist()) <= set(rows.tolist())
        blocks = (chosen.index[:, 0] // WIDTH)[chosen.held.any(1)].bincount()
        used = blocks[blocks > 0]
        assert len(used) == min(len(rows), count)
        assert used.unique().tolist() == [min(count // len(used), 4)]
        assert float(chosen.population) == 4 * len(set(rows.tolist()))
        assert chosen.index[chosen.held].unique().numel() == chosen.held.sum(), "no element twice"
        dense = gradient.to_dense().reshape(-1)[chosen.index].where(chosen.held, 0.0).view(-1)
        torch.testing.assert_close(chosen.gradient, dense)


def test_one_block_of_a_row_may_be_any_of_it():
    model = embedding()
    backward(model, 0, 200)
    chosen = [TouchedRows(model.weight.grad, 16, 16, seed=seed).index[:, 0] % WIDTH // 16 for seed in range(20)]
    assert torch.cat(chosen).unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sparse_from", [0, 3])
def test_a_layer_with_a_sparse_gradient_has_no_oracle_and_the_others_keep_theirs(sparse_from):
    torch.manual_seed(0)
    sgd, layers = partial(torch.optim.SGD, lr=0.1), nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 1))
    model, optimizer, handle = watched(sgd, layers, every=2, sample="all", oracle=True)
    for step in range(8):
        model[0].sparse = step >= sparse_from
        optimizer.zero_grad()
        model(torch.randint(0, 100, (8,))).square().mean().backward()
        optimizer.step()
    layers, totals = handle.summary()["layers"], totals_of(handle)
    assert layers["0.weight"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert layers["0.weight"]["edq_oracle_ratio"] is None
    assert layers["1.weight"]["edq_oracle_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert totals["1.weight"]["oracle_steps"] == totals["1.bias"]["oracle_steps"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_touches_no_row_is_measured_as_idle(name):
    model, optimizer, handle = watched(OPTIMIZERS[name], embedding())
    for step in range(6):
        backward(model, step)
        if step in (0, 2):
            empty = torch.empty(0, WIDTH)
            model.weight.grad = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), empty, (ROWS, WIDTH))
        optimizer.step()
        totals = totals_of(handle)["weight"]
        assert totals["elements"] == ROWS * WIDTH
        if step in (0, 2):
            assert totals["idle"] == totals["unchanged"] == ROWS * WIDTH
            assert totals["sampled"] == totals["lost"] == totals["effective_squared_sum"] == 0
        else:
            assert totals["sampled"] > 0
            assert handle.summary()["model"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_dense_embedding_of_which_the_sample_saw_no_used_row_is_not_measured():
    torch.manual_seed(0)
    parts = nn.ModuleDict({"table": nn.Embedding(50_000, 16), "out": nn.Linear(16, 4)}).to(torch.bfloat16)
    model, optimizer, handle = watched(partial(adamw, weight_decay=0.0), parts, sample=1024)
    for _ in range(3):
        optimizer.zero_grad()
        used = torch.arange(16) + 7
        model["out"](model["table"](used)).float().square().sum().backward()
        optimizer.step()
        table = handle.summary()["layers"]["table.weight"]
        assert table["elements"] == 800_000
        assert table["lost_update_ratio"] is None
        assert table["edq_ratio"] is None
        assert table.get("idle") is None


def test_a_state_without_a_sign_is_not_looked_at_whole(monkeypatch):
    """No step is proportional to a second moment; a look at it took two passes over each, for nothing."""
    looked_at = []
    squares = BlockLayout.whole_squares

    def noted(layout, samples, tensors):
        looked_at.append(tensors)
        return squares(layout, samples, tensors)

    monkeypatch.setattr(BlockLayout, "whole_squares", noted)
    model, optimizer, _ = watched(model=nn.Linear(100, 100).to(torch.bfloat16), sample=1024)
    for _ in range(12):
        train(model, optimizer, 1, lambda own, step: mean_square(own, torch.randn(8, 100)))
        if len(looked_at) == 2:
            gradient, momentum = looked_at
            assert gradient[0] is model.weight.grad
            assert momentum[0] is optimizer.state[model.weight]["exp_avg"]
    # The first measured step, the first that has states, and the tenth after that.
    assert len(looked_at) == 6
