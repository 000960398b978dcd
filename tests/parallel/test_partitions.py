"""Flat partitions are taken apart into the tensors they stand for.

DeepSpeed's first two stages step one; its third shows its optimizer one at a time, and all make one report a step.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collage_agent.handle import watch
from collage_agent.integrations.attach import find_model
from torch import distributed, nn

from tests.parallel.measuring import Recorder

SUB_GROUPS = (("0.weight", "0.bias"), ("2.weight",), ("2.bias", "4.weight"))
GROUPS = (0, 0, 1)
STEPS = 4


def partitioned(model, first, last):
    """A flat fp32 parameter with elements first to last of all weights in a row, tied to them as DeepSpeed does."""
    weights = list(model.parameters())
    whole = torch.cat([weight.detach().float().reshape(-1) for weight in weights])
    flat = nn.Parameter(whole[first:last].clone())
    begin = 0
    for weight in weights:
        end = begin + weight.numel()
        start, stop = max(begin, first), min(end, last)
        weight._hp_mapping = None
        if start < stop:
            address = SimpleNamespace(start=start - first, numel=stop - start)
            fragment = flat.detach().narrow(0, address.start, address.numel)
            weight._hp_mapping = SimpleNamespace(hp_fragment=fragment, hp_fragment_address=address)
        begin = end
    return flat


def test_a_partition_is_reported_under_the_names_of_its_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 8)).to(torch.bfloat16)
    flat = partitioned(model, 0, 700)
    optimizer = torch.optim.AdamW([flat], lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all")
    flat.grad = torch.randn(700)
    before = flat.detach().clone()
    optimizer.step()
    moved = (flat.detach() - before).double().split([600, 20, 80])
    layers = handle.summary()["layers"]
    assert list(layers) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [layers[name]["elements"] for name in layers] == [600, 20, 80, None]
    for name, change in zip(("0.weight", "0.bias", "1.weight"), moved, strict=True):
        assert layers[name]["effective_norm"] == pytest.approx(float(change.norm()), rel=1e-12)
    assert handle._last is not None
    told = {layer.name: layer for layer in handle._last.layout.layers}
    assert (told["1.weight"].shape, told["1.weight"].elements) == ([8, 20], 80)
    assert (told["1.bias"].elements, told["1.bias"].module_type) == (0, "Linear")
    assert "cast to bfloat16" in handle.info.intent_reason


class Engine:
    """Partitions of one of two ranks, stepped as DeepSpeed does it, and tied to the weights as there."""

    def __init__(self, rank, ranks=2):
        torch.manual_seed(0)
        layers = (nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
        self.model = nn.Sequential(*layers).to(torch.bfloat16)
        weights: dict[str, Any] = dict(self.model.named_parameters())
        self.weights = weights
        self.optimizer = torch.optim.AdamW([{"params": [weight], "lr": 1e-2} for weight in weights.values()][:2])
        self.grad_position: dict[int, list[int]] = {}
        self.fp32_partitioned_groups_flat: list[torch.Tensor] = []
        self.sub_group_to_group_id = dict(enumerate(GROUPS))
        for index, names in enumerate(SUB_GROUPS):
            parts: list[torch.Tensor] = []
            for name in names:
                weight = weights[name]
                size = -(-weight.numel() // ranks)
                place = sum(part.numel() for part in parts)
                self.grad_position[id(weight)] = [index, place, size]
                padded = torch.full((size * ranks,), torch.nan)
                padded[: weight.numel()] = weight.detach().reshape(-1)
                parts.append(padded[rank * size : (rank + 1) * size])
                weight._z3_optimizer, weight.ds_process_group = self, None
                weight.ds_shape, weight.ds_numel = weight.shape, weight.numel()
            self.fp32_partitioned_groups_flat.append(torch.cat(parts).requires_grad_())
        for weight in weights.values():
            weight.data = torch.empty(0, dtype=weight.dtype)
        for group in self.optimizer.param_groups:
            group["params"] = []

    def get_param_id(self, weight):
        return id(weight)

    def step(self):
        for group, partition in zip(GROUPS, self.fp32_partitioned_groups_flat, strict=True):
            partition.grad = torch.randn_like(partition)
            self.optimizer.param_groups[group]["params"] = [partition]
            self.optimizer.step()
            self.optimizer.param_groups[group]["params"] = []
            partition.grad = None

    def pieces(self, rank):
        """{name: this rank's elements}, copied and without padding."""
        found = {}
        for name, weight in self.weights.items():
            index, start, size = self.grad_position[id(weight)]
            held = max(0, min(size, weight.ds_numel - rank * size))
            found[name] = self.fp32_partitioned_groups_flat[index].detach()[start : start + held].clone()
        return found


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda group=None: request.param)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 2)
    return request.param


@pytest.mark.slow
def test_partitions_that_are_stepped_in_turn_make_one_report_a_step(rank):
    engine, recorder = Engine(rank), Recorder()
    handle = watch(engine.model, engine.optimizer, every=2, sample="all", oracle=True, reporter=recorder)
    assert [group["params"] for group in engine.optimizer.param_groups] == [[], []]
    for _ in range(STEPS):
        before = engine.pieces(rank)
        engine.step()
    assert handle.step == STEPS
    assert [measurement.step for measurement in recorder.measurements] == [1, 2, 4]
    told = {layer.name: layer for layer in recorder.measurements[-1].layout.layers}
    layers, after = handle.summary()["layers"], engine.pieces(rank)
    assert sorted(told) == sorted(after)
    for name, weight in engine.weights.items():
        assert (told[name].shape, told[name].elements) == (list(weight.ds_shape), after[name].numel())
        moved = (after[name].double() - before[name].double()).norm()
        assert layers[name]["elements"] == after[name].numel()
        assert layers[name]["effective_norm"] == pytest.approx(float(moved), rel=1e-12)
        assert layers[name]["edq_ratio"] == pytest.approx(1, abs=1e-3)
    assert handle.info.parameters == sum(piece.numel() for piece in after.values())
    assert "oracle_restarts" not in recorder.measurements[-1].scalars
    assert "cast to bfloat16" in handle.info.intent_reason


@pytest.mark.slow
def test_watching_changes_no_bit(rank):
    plain, watched = Engine(rank), Engine(rank)
    watch(watched.model, watched.optimizer, every=1, oracle=True, reporter=Recorder())
    for engine in (plain, watched):
        torch.manual_seed(7)
        for _ in range(STEPS):
            engine.step()
    for name, piece in plain.pieces(rank).items():
        assert torch.equal(piece, watched.pieces(rank)[name])


def test_a_rank_without_elements_announces_the_tensor(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda group=None: 3)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 4)
    engine, recorder = Engine(3, ranks=4), Recorder()
    watch(engine.model, engine.optimizer, every=1, reporter=recorder)
    engine.step()
    (measurement,) = recorder.measurements
    told = {layer.name: layer.elements for layer in measurement.layout.layers}
    assert told == {"0.weight": 8, "0.bias": 0, "2.weight": 3, "2.bias": 0, "4.weight": 0}


def test_a_weight_shared_out_over_a_part_of_the_ranks_is_refused(rank, monkeypatch):
    engine = Engine(rank)
    half = SimpleNamespace()
    engine.weights["0.weight"].ds_process_group = half
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 1 if group is half else 2)
    with pytest.raises(ValueError, match=r"0\.weight is partitioned over 1 of 2 ranks"):
        watch(engine.model, engine.optimizer)


def test_a_partition_that_is_elsewhere_is_refused(rank):
    engine = Engine(rank)
    engine.fp32_partitioned_groups_flat[1] = torch.empty(0)
    with pytest.raises(ValueError, match=r"2\.weight is not in memory"):
        watch(engine.model, engine.optimizer)
    assert [group["params"] for group in engine.optimizer.param_groups] == [[], []]


@pytest.mark.slow
def test_the_model_of_such_an_optimizer_is_found_during_its_step(rank):
    engine, found = Engine(rank), []
    engine.optimizer.register_step_pre_hook(lambda optimizer, *_: found.append(find_model(optimizer)))
    engine.step()
    assert found == [engine.model] * len(SUB_GROUPS)
