"""Ranks that go on: nothing is said of a whole resume, and what one rank lost is found by it and in the sum."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from collage_monitor.diagnosis.residuals import DROPPED
from collage_monitor.statistics import finish
from tests.parallel.checkpoints import SOURCES, kind_of
from tests.parallel.launch import asked, launch
from tests.parallel.merged import merged_layers
from tests.parallel.resumes import CONVERSIONS

pytestmark = pytest.mark.slow


def off(words):
    """What is said against what stands beside the weights."""
    return [found.text for found in words["findings"] if found.health == "residuals are off"]


@pytest.fixture(scope="module")
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumes")
    launch("resumes.written", 2, folder, ASKED=asked(request, "source"))
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids=["on 2", "on 4"])
def resumed(written, request):
    return launch("resumes.gone_on", request.param, written, ASKED=asked(request, "source"))


@pytest.mark.drawn(by=lambda source, kind, **_: [*product(kind_of(source), [kind])])
@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.parametrize("source", SOURCES)
def test_whole_resumes_of_two_ranks_are_not_accused(source, kind, resumed):
    for words in (seen[source, kind] for seen in resumed):
        assert words["losses"] == []
        assert off(words) == []


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropped")
    return cache(lambda rule: launch("resumes.dropped_by_one", 2, folder, RULE=rule))


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "source", "target"), CONVERSIONS)
def test_what_one_rank_dropped_after_a_conversion_is_found(rule, source, target, dropped):
    cell, ranks = (rule, source, target), dropped(rule)
    for seen in ranks:
        whole, _ = seen[cell]
        assert whole["losses"] == []
        assert off(whole) == []
    (_, kept), (_, lost) = (seen[cell] for seen in ranks)
    assert off(kept) == []
    assert off(lost)
    totals = merged_layers([kept, lost], 0).values()
    keys = {key for layer in totals for key in layer}
    summed = {key: np.nansum([layer.get(key, np.nan) for layer in totals]) for key in keys}
    assert 0.3 < finish(DROPPED.metric, summed) < 0.9
    assert finish(DROPPED.metric, summed) > DROPPED.threshold
