"""Distributed checkpoints across strategies and ranks: two write, four read and write again, one reads."""

from __future__ import annotations

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, load_distributed

from tests.parallel.checkpoints import OPTIONS, SOURCES, expected, kind_of, read_alone, targets_of
from tests.parallel.launch import asked, launch
from tests.parallel.models import injected

pytestmark = pytest.mark.slow


def of_each_kind(test):
    return pytest.mark.drawn(by=kind_of)(pytest.mark.parametrize("source", SOURCES)(test))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(request, folder):
    return launch("checkpoints.written", 2, folder, ASKED=asked(request, "source"))[0]


@pytest.fixture(scope="module")
def resharded(request, folder, written):
    return launch("checkpoints.resharded", 4, folder, ASKED=asked(request, "source"))[0]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@of_each_kind
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


@of_each_kind
def test_one_process_reads_what_four_wrote_after_two(source, resharded, folder):
    found, _ = read_alone(folder / f"{source} again", targets_of(source))
    assert_same(found, resharded[source][0])


@pytest.mark.parametrize("source", ["plus"])
def test_what_is_not_there_is_named(source, written, folder):
    model = injected(torch.bfloat16)
    model.head = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"has no weight head\.bias"):
        load_distributed(folder / source, model, CollageAdamW(model.parameters(), strategy="plus"))
    del model.head
    with pytest.raises(ValueError, match="it is of another update rule"):
        load_distributed(folder / source, model, CollageLion(model.parameters(), strategy="light"))
