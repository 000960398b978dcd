"""Round trips of every message in both encodings, non-finite values, byte order, refusals that name the field."""

import math
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor import wire
from collage_monitor.errors import WireError

BOTH = pytest.mark.parametrize("content_type", [wire.MSGPACK, wire.JSON])
LAYER = wire.Layer(name="h.0.weight", shape=[4, 8], dtype="bfloat16", elements=32, module_type="Linear")
MESSAGES = [
    wire.RunCreate(
        run_id="01J", name="ε", group="g", tags=["a"], notes="n", seed=-1, config={"lr": 1e-3, "b": [1]}
    ),
    wire.RunUpdate(state="finished"),
    wire.AttemptCreate(launch_id="a-1", first_step=7),
    wire.StreamCreate(
        stream_id="s",
        launch_id="a-1",
        rank=1,
        world_size=2,
        process_id=99,
        layers=[LAYER],
        statistics=["lost"],
        watch=wire.WatchInfo(optimizer="AdamW", sample="all", oracle=True),
    ),
]


@BOTH
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_way(message, content_type):
    data = wire.encode_message(message, content_type)
    assert wire.decode_message(data, type(message), content_type) == message


REPORT = wire.Report(seq=8, step=1, time=2.0)


def encoded(body, content_type):
    return (msgspec.json if content_type == wire.JSON else msgspec.msgpack).encode(body)


def reports():
    values = st.floats(allow_nan=True, allow_infinity=True, width=64)
    return st.builds(
        lambda seq, step, scalars, rows, layers, block: wire.Report(
            seq=seq,
            step=step,
            time=1.5e9,
            scalars=scalars,
            statistic_count=rows,
            layer_count=layers,
            statistics=wire.array_to_bytes(np.resize(np.array(block), (rows, layers))),
            model=wire.array_to_bytes(np.resize(np.array(block), (rows,))),
            reports_of_step=rows,
        ),
        st.integers(0, 2**53),
        st.integers(0, 2**53),
        st.dictionaries(st.text(max_size=8), values, max_size=3),
        st.integers(1, 3),
        st.integers(0, 3),
        st.lists(values, min_size=1, max_size=9),
    )


def same_number(left, right):
    return left == right or (math.isnan(left) and math.isnan(right))


@pytest.mark.slow
@BOTH
@given(st.lists(reports(), max_size=3))
def test_batches_keep_every_number(content_type, batch):
    sent = wire.encode_batch(wire.ReportBatch(reports=batch), content_type)
    found = wire.decode_batch(sent, content_type).reports
    assert len(found) == len(batch)
    for left, right in zip(found, batch, strict=True):
        for name in ("seq", "step", "statistic_count", "layer_count"):
            assert getattr(left, name) == getattr(right, name)
        assert left.scalars.keys() == right.scalars.keys()
        assert all(same_number(left.scalars[name], right.scalars[name]) for name in left.scalars)
        shape = (right.statistic_count, right.layer_count)
        for name, size in (("statistics", shape), ("model", shape[:1])):
            a, b = (wire.array_from_bytes(getattr(side, name), size) for side in (left, right))
            np.testing.assert_array_equal(a, b)


@BOTH
@pytest.mark.parametrize(
    "batch",
    [
        wire.ReportBatch(reports=[wire.Report(seq=0, step=1, time=2.0, scalars={"loss": 1.0})]),
        wire.ReportBatch(reports=[REPORT], gaps=[wire.ReportGap(first_seq=3, last_seq=7, reason="spool_full")]),
    ],
    ids=["scalars alone", "what will never come"],
)
def test_batches_survive_the_way(batch, content_type):
    assert wire.decode_batch(wire.encode_batch(batch, content_type), content_type) == batch


@BOTH
def test_an_older_agent_sends_no_gaps_and_tells_of_its_step_alone(content_type):
    plain = {"reports": [{"seq": 8, "step": 1, "time": 2.0}]}
    found = wire.decode_batch(encoded(plain, content_type), content_type)
    assert found == wire.ReportBatch(reports=[REPORT])
    assert found.reports[0].reports_of_step == 1


def test_blocks_are_little_endian_in_c_order():
    assert wire.array_to_bytes(np.array([[1.0, 2.0]])) == bytes.fromhex("000000000000f03f0000000000000040")
    big = np.array([1.0, 2.0], dtype=">f8")
    assert wire.array_to_bytes(big) == wire.array_to_bytes(big.astype("<f8"))
    transposed = np.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(wire.array_from_bytes(wire.array_to_bytes(transposed), (3, 2)), transposed)


def test_a_block_of_the_wrong_length_says_what_it_wanted():
    with pytest.raises(WireError, match="8 bytes, but 2×3 float64 take 48") as caught:
        wire.array_from_bytes(b"\0" * 8, (2, 3), "model")
    assert caught.value.field == "model"


def test_numbers_that_json_lacks():
    for value, number in ((math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN"), (0.5, 0.5)):
        assert wire.to_number(value) == number
        assert same_number(wire.from_number(number), value)
    found = wire.undefined_to_none(np.array([1.0, np.nan, np.inf]))
    assert wire.encode_json(found) == b'[1.0,null,"Infinity"]'
    assert wire.undefined_to_none(np.array([])) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"run_id": ""}, "run_id"),
        ({"run_id": "a b"}, "run_id"),
        ({"run_id": "ab\n"}, "run_id"),
        ({"run_id": "a" * 65}, "run_id"),
        ({"run_id": "a", "tags": ["t"] * 65}, "tags"),
        ({"run_id": "a", "resume": "perhaps"}, "resume"),
        ({"name": "x"}, ""),
    ],
)
@BOTH
def test_a_wrong_field_is_named(body, field, content_type):
    with pytest.raises(WireError) as caught:
        wire.decode_message(encoded(body, content_type), wire.RunCreate, content_type)
    assert caught.value.field == field


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"reports":',
        b'{"reports":[{"seq":-1,"step":0,"time":0}]}',
        b'{"reports":[{"seq":0,"step":0,"time":NaN}]}',
        b'{"reports":[{"seq":0,"step":0,"time":1e999}]}',
        b'{"reports":[{"seq":0,"step":0,"time":0,"statistics":[[1],[1,2]]}]}',
        b'{"reports":[{"seq":0,"step":0,"time":0,"model":["seven"]}]}',
        b"[" * 100_000,
    ],
)
def test_garbage_is_a_wire_error(body, content_type):
    with pytest.raises(WireError):
        wire.decode_batch(body, content_type)


@BOTH
def test_reports_apart_cost_no_more_memory_than_together(content_type):
    count = 2**20
    if content_type == wire.JSON:
        sent = b'{"reports":[' + b"0," * count + b"0]}"
    else:
        sent = b"\x81\xa7reports\xdd" + count.to_bytes(4, "big") + b"\x00" * count
    tracemalloc.start()
    with pytest.raises(WireError, match="length <= 5000"):
        wire.decode_batch_singly(sent, content_type)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * len(sent)


def test_the_package_has_no_names_but_those_it_says():
    """Pages that list every message took what a loop had left behind for one, which message it was by chance."""
    kinds = {name for name, value in vars(wire).items() if isinstance(value, type)}
    assert kinds <= set(wire.__all__)
