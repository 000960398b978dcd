"""Distributed checkpoints across strategies and ranks: two write, four read and write again, one reads."""

from __future__ import annotations

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, load_distributed

from tests.parallel.checkpoints import OPTIONS, SOURCES, expected, read_alone, targets_of
from tests.parallel.launch import launch
from tests.parallel.models import injected

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder):
    return launch("checkpoints.written", 2, folder)[0]


@pytest.fixture(scope="module")
def resharded(folder, written):
    return launch("checkpoints.resharded", 4, folder)[0]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("source", SOURCES)
def test_four_ranks_read_what_two_wrote_under_another_strategy(source, written, resharded):
    found, rate = resharded[source]
    assert_same(found, expected(written[source], targets_of(source)))
    assert rate == OPTIONS["lr"]


@pytest.mark.nightly
@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("source", SOURCES)
def test_one_process_reads_every_source_under_every_strategy(source, target, written, folder):
    found, rate = read_alone(folder / source, target)
    assert_same(found, expected(written[source], target))
    assert rate == OPTIONS["lr"]


@pytest.mark.parametrize("source", SOURCES)
def test_one_process_reads_what_four_wrote_after_two(source, resharded, folder):
    found, _ = read_alone(folder / f"{source} again", targets_of(source))
    assert_same(found, resharded[source][0])


def test_what_is_not_there_is_named(written, folder):
    model = injected(torch.bfloat16)
    model.head = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has no weight head\.bias"):
        load_distributed(folder / "plus", model, CollageAdamW(model.parameters()))
    del model.head
    with pytest.raises(ValueError, match="it is of another update rule"):
        load_distributed(folder / "plus", model, CollageLion(model.parameters()))
