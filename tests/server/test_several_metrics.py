"""Several metrics in one question: each is answered as alone."""

from __future__ import annotations

import msgspec

from collage_monitor import wire
from tests.server.store.contract import LIMITS

SEVERAL = ["edq_ratio", "loss", "grad_norm", "state_decrement_ratio/exp_avg_sq"]


def test_several_metrics_are_answered_together_as_each_alone(server, monkeypatch):
    monkeypatch.setattr(server.app.state.collage.store.sealing, "limits", LIMITS)
    steps = range(1, 70)
    server.filled("r1", "s1", steps=steps)
    server.filled("r2", "s2", steps=steps)
    server.seal()
    for chosen in ("", "&layer=blocks.0.weight", "&points=2", "&rank=0", "&axis=tokens&from=20"):
        check(server, [metric for metric in SEVERAL if metric != "loss" or "layer" not in chosen], chosen)


def check(server, metrics, chosen):
    asked = "&".join(f"metric={metric}" for metric in metrics)
    alone = {metric: server.get(f"/runs/r1/series?metric={metric}{chosen}", wire.Series) for metric in metrics}
    together = server.get(f"/runs/r1/series?{asked}{chosen}", wire.Series)
    first, *others = metrics
    assert list(together.more) == others
    assert together.more == {metric: alone[metric] for metric in others}
    assert msgspec.structs.replace(together, more=msgspec.UNSET) == alone[first]
    compared = server.get(f"/compare?run=r1&run=r2&{asked}{chosen}", wire.Comparison)
    assert [run.run_id for run in compared.runs] == ["r1", "r2"]
    beside = server.get(f"/compare?run=r1&metric={first}{chosen}", wire.Comparison).runs[0].series
    assert msgspec.structs.replace(compared.runs[0].series, more=msgspec.UNSET) == beside
    assert compared.runs[0].series.more.keys() == set(others)


def test_an_answer_about_one_metric_says_nothing_of_more(filled):
    assert b'"more"' not in filled.get("/runs/r1/series?metric=edq_ratio").encode()
    refused = filled.get("/runs/r1/series?metric=edq_ratio&metric=loss&cursor=", status=422)
    assert (refused.code, refused.field) == ("unprocessable", "metric")
