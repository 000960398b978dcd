"""A few real steps of the demo's training, watched into memory: what is reported, and what plans share."""

import numpy as np
import pytest
import torch
from collage_agent.transport import MemoryTransport
from collage_agent.watch_options import WatchArguments
from collage_demo import training
from collage_demo.corpus import Corpus
from collage_demo.recipe import PLANS, Plan, Recipe
from collage_demo.training import new_model, train

from collage_monitor import wire

RECIPE = Recipe(steps=12, batch_size=4, length=32, layers=1, width=32, measure_every=4, validate_every=5)


@pytest.fixture(scope="module")
def corpus():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (5000,), dtype=torch.uint8, generator=generator)
    return Corpus(text[:4000], text[4000:])


def test_every_plan_starts_from_the_same_weights():
    models = [new_model(plan, RECIPE) for plan in PLANS]
    reference = [parameter.float() for parameter in models[0].parameters()]
    for plan, model in zip(PLANS, models, strict=True):
        for expected, found in zip(reference, model.parameters(), strict=True):
            assert found.dtype == getattr(torch, plan.dtype)
            assert torch.equal(found.float(), expected)


def test_what_a_training_reports(corpus, tmp_path):
    transport, seen = MemoryTransport(), []
    plan = Plan("plus", "bfloat16")
    outcome = train(plan, RECIPE, corpus, lambda *values: seen.append(values), folder=tmp_path, transport=transport)
    assert [step for step, _, _ in seen] == [5, 10, 12]
    assert outcome.steps == 12
    assert outcome.reports_dropped == 0
    assert outcome.tokens_per_cpu_second > 0
    reports = [report for message in transport.messages for report in getattr(message, "reports", ())]
    assert outcome.reports_sent == len(reports)
    assert {report.step for report in reports if report.statistics is not None} == {1, 4, 8, 12}
    losses = {report.step: report.scalars["loss"] for report in reports if "loss" in report.scalars}
    assert sorted(losses) == list(range(1, 13))
    validations = {r.step: r.scalars["validation_loss"] for r in reports if "validation_loss" in r.scalars}
    assert validations == {step: pytest.approx(value) for step, _, value in seen}
    (created,) = [message for message in transport.messages if isinstance(message, wire.RunCreate)]
    assert created.run_id == outcome.run_id
    assert created.config["strategy"] == "plus"


def test_the_same_seed_gives_the_same_losses_and_strategies_part(corpus, tmp_path):
    def losses(plan):
        seen = []
        train(
            plan,
            RECIPE,
            corpus,
            lambda *values: seen.append(values),
            folder=tmp_path,
            transport=MemoryTransport(),
        )
        return seen

    plain = Plan("plain", "bfloat16")
    assert losses(plain) == losses(plain)
    assert losses(plain) != losses(Plan("plus", "bfloat16"))


def test_a_resume_without_residuals_is_a_second_attempt_in_which_they_are_0(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_PATIENCE_STEPS", 20)
    transport = MemoryTransport()
    plan = Plan("light", "bfloat16")
    said = {"folder": tmp_path, "transport": transport, "loses_residuals": True}
    outcome = train(plan, RECIPE, corpus, lambda *_: None, **said)
    attempts = [message for message in transport.messages if isinstance(message, wire.AttemptCreate)]
    assert [attempt.first_step for attempt in attempts] == [1, 4]
    reports = [report for message in transport.messages for report in getattr(message, "reports", ())]
    measured = [report for report in reports if report.statistics is not None]
    assert [report.step for report in measured[:4]] == [1, 4, 4, 8]
    resumed = [message for message in transport.messages if isinstance(message, wire.StreamCreate)][-1].statistics
    first = dict(zip(resumed, np.frombuffer(measured[2].model), strict=True))
    assert first["residual_dropped"] > 0.5 * first["residual_elements"]
    assert outcome.steps == 4 + 20 - 1 + 3


def test_a_study_may_build_other_optimizers_each_with_a_rate_of_its_own(corpus, tmp_path):
    transport, taken = MemoryTransport(), []

    def build(plan, recipe):
        model = new_model(plan, recipe)
        first, *rest = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]
        optimizers[0].register_step_pre_hook(
            lambda *_: taken.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        )
        return model, optimizers

    plan, recipe = Plan("kept otherwise", "float32"), Recipe(**{**vars(RECIPE), "warm_up_steps": 4})
    options: WatchArguments = {"casts": ("mxfp8",)}
    train(
        plan,
        recipe,
        corpus,
        lambda *_: None,
        folder=tmp_path,
        transport=transport,
        build=build,
        settings={"rule": "two"},
        options=options,
    )
    assert taken == [[0.1 * factor, 1e-3 * factor] for factor in (0.25, 0.5, 0.75, *[1.0] * 9)]
    (created,) = [message for message in transport.messages if isinstance(message, wire.RunCreate)]
    assert created.config["rule"] == "two"
    stream = [message for message in transport.messages if isinstance(message, wire.StreamCreate)][-1]
    assert "cast_changed/mxfp8" in stream.statistics
    assert stream.watch is not None
    assert stream.watch.strategy is None
