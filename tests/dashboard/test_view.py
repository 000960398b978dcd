"""The view in the address: a round trip for every view, and tolerance for what an address may hold."""

import pytest
from collage_dashboard.view import MAXIMUM_RUNS, View, read_address, read_steps, write_address
from hypothesis import given
from hypothesis import strategies as st

identifiers = st.text("abcXYZ019_.:- /%&?", min_size=1, max_size=12)
names = identifiers.map(lambda name: name.replace("/", "")).filter(lambda name: name not in {"", ".", ".."})
ends = st.integers(0, 10**12) | st.integers(0, 10**9).map(lambda thousandths: thousandths / 1000)
zooms = st.tuples(ends, ends).filter(lambda pair: pair[0] < pair[1])
panels = st.sampled_from(["loss", "state_decrement_ratio/exp_avg", "my own & loss"])
pages = st.one_of(
    st.builds(
        View,
        page=st.just("runs"),
        query=st.text(max_size=8),
        project=st.none() | st.sampled_from(["a/b", "c&d"]),
        health=st.none() | st.just("losing updates"),
        sort=st.sampled_from(["-updated_at", "edq_ratio", "-name"]),
        by=st.none() | st.sampled_from(["strategy", "group", "configuration"]),
        archived=st.none() | st.just("1"),
        baseline=st.none() | st.just("run 1"),
        **{
            name: st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=3).map(tuple)
            for name in ("where", "columns", "pins", "opened")
        },
    ),
    st.builds(
        View,
        page=st.just("compare"),
        runs=st.lists(identifiers, unique=True, max_size=5).map(tuple),
        metric=st.none() | st.sampled_from(["param_norm", "state_decrement_ratio/exp_avg_sq", "my own & loss"]),
        axis=st.sampled_from(["step", "tokens", "time"]),
        smoothing=st.integers(0, 99).map(lambda percent: percent / 100),
        scale=st.sampled_from(["linear", "log"]),
        zoom=st.none() | zooms,
        left_out=st.integers(0, 10**6),
    ),
    st.builds(
        View,
        page=st.just("run"),
        runs=names.map(lambda name: (name,)),
        layer=st.none() | st.sampled_from(["blocks.0.weight", "a=b&c"]),
        step=st.none() | st.integers(0, 10**12),
        axis=st.sampled_from(["step", "tokens", "time"]),
        scale=st.sampled_from(["linear", "log"]),
        zoom=st.none() | zooms,
        at=st.none() | st.tuples(*[st.integers(0, 10**6)] * 2).map(lambda pair: tuple(sorted(pair))),
        schedule=st.sampled_from(["", "cosine:3e-4:100:10000"]),
        query=st.text(max_size=8),
        panels=st.lists(panels, unique=True).map(tuple),
        order=st.sampled_from(["depth", "worst"]),
        rows=st.sampled_from(["all", "block", "type"]),
        tab=st.sampled_from(["layers", "curves", "norms", "states", "classes", "oracle", "about"]),
    ),
)


@pytest.mark.slow
@given(pages)
def test_a_view_comes_back_from_its_address(view):
    assert read_address(*write_address(view)) == view


def test_a_default_view_has_a_bare_address_and_what_cannot_be_read_keeps_its_default():
    views = (View(), View(page="first"), View(page="run", runs=("r1",)))
    assert [write_address(view) for view in views] == [("/runs", ""), ("/", ""), ("/run/r1", "")]
    assert read_address("/run/r1", "?axis=moon&step=-3&smoothing=nan&order=&tab=zebra&what=ever") == views[2]
    assert read_address("/compare", "?smoothing=7").smoothing == 0.99
    assert read_address(None, None) == views[1]
    assert read_address("/", "?project=a") == read_address("/runs", "?project=a"), "an old address of the table"
    assert read_address("/nowhere/at/all", "").page == "missing"


def test_runs_keep_their_order_doubles_go_and_those_that_are_too_many_are_counted():
    assert MAXIMUM_RUNS >= 60
    search = "?" + "&".join(f"run=r{place}" for place in range(MAXIMUM_RUNS + 5))
    view = read_address("/compare", search)
    assert (len(view.runs), view.left_out) == (MAXIMUM_RUNS, 5)
    assert read_address(*write_address(view)) == view
    assert read_address("/compare", "?run=b&run=a&run=b").runs == ("b", "a")
    pins = "&".join(f"pin=r{place}" for place in (0, *range(12)))
    assert read_address("/runs", f"?{pins}").pins == tuple(f"r{place}" for place in range(10)), "ten at most"


@pytest.mark.parametrize(
    "search", ["?from=20&to=10", "?from=10", "?from=nan&to=inf", "?from=-5&to=1", "?from=x&to=9", "?from=1&to=inf"]
)
def test_a_zoom_without_two_ends_in_order_is_none(search):
    assert read_address("/run/a", search).zoom is None


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("800", (800, 800)),
        ("1,500", (1500, 1500)),
        ("8-9", (8, 9)),
        ("8 – 9", (8, 9)),
        ("9-9", (9, 9)),
        ("9-8", None),
        ("-3", None),
        ("1-2-3", None),
        ("now", None),
    ],
)
def test_a_step_or_a_range_is_read_as_people_write_it_and_ends_where_it_begins_or_later(text, steps):
    view = read_address("/run/a", f"?at={text}")
    assert read_steps(text) == view.at == steps
    assert read_address(*write_address(view)) == view
