"""The demo's corpus, split by file, and a few real steps of its training, watched into memory: what is reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from collage_agent.transport import MemoryTransport
from collage_demo import training
from collage_demo.corpus import DOCUMENTATION, Corpus, batch, documentation, standard_library
from collage_demo.recipe import PLANS, Plan, Recipe
from collage_demo.training import new_model, train

from collage_monitor import wire

RECIPE = Recipe(steps=12, batch_size=4, length=32, layers=1, width=32, measure_every=4, validate_every=5)


@pytest.fixture(scope="module")
def corpus():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (5000,), dtype=torch.uint8, generator=generator)
    return Corpus(text[:4000], text[4000:])


@pytest.fixture
def trained(corpus, tmp_path):
    """Trains a plan: its outcome, what was told of each validation, and all messages."""

    def run(plan, recipe=RECIPE, **more):
        transport, seen = MemoryTransport(), []
        told = {"folder": tmp_path, "transport": transport, **more}
        return train(plan, recipe, corpus, lambda *values: seen.append(values), **told), seen, transport.messages

    return run


def of_kind(messages, kind):
    return [message for message in messages if isinstance(message, kind)]


def reports_in(messages):
    return [report for message in messages for report in getattr(message, "reports", ())]


def test_every_plan_starts_from_the_same_weights():
    models = [new_model(plan, RECIPE) for plan in PLANS]
    reference = [parameter.float() for parameter in models[0].parameters()]
    for plan, model in zip(PLANS, models, strict=True):
        for expected, found in zip(reference, model.parameters(), strict=True):
            assert found.dtype == getattr(torch, plan.dtype)
            assert torch.equal(found.float(), expected)


def test_what_a_training_reports(trained):
    outcome, seen, messages = trained(Plan("plus", "bfloat16"))
    assert [step for step, _, _ in seen] == [5, 10, 12]
    assert outcome.steps == 12
    assert outcome.reports_dropped == 0
    assert outcome.tokens_per_cpu_second > 0
    reports = reports_in(messages)
    assert outcome.reports_sent == len(reports)
    assert {report.step for report in reports if report.statistics is not None} == {1, 4, 8, 12}
    losses = {report.step: report.scalars["loss"] for report in reports if "loss" in report.scalars}
    assert sorted(losses) == list(range(1, 13))
    validations = {r.step: r.scalars["validation_loss"] for r in reports if "validation_loss" in r.scalars}
    assert validations == {step: pytest.approx(value) for step, _, value in seen}
    (created,) = of_kind(messages, wire.RunCreate)
    assert created.run_id == outcome.run_id
    assert created.config["strategy"] == "plus"


def test_the_same_seed_gives_the_same_losses_and_strategies_part(trained):
    first, again, other = (trained(Plan(name, "bfloat16"))[1] for name in ("plain", "plain", "plus"))
    assert first == again != other


@pytest.mark.slow
def test_a_resume_without_residuals_is_a_second_attempt_in_which_they_are_0(trained, monkeypatch):
    monkeypatch.setattr(training, "_PATIENCE_STEPS", 20)
    outcome, _, messages = trained(Plan("light", "bfloat16"), loses_residuals=True)
    assert [attempt.first_step for attempt in of_kind(messages, wire.AttemptCreate)] == [1, 4]
    measured = [report for report in reports_in(messages) if report.statistics is not None]
    assert [report.step for report in measured[:4]] == [1, 4, 4, 8]
    resumed = of_kind(messages, wire.StreamCreate)[-1].statistics
    first = dict(zip(resumed, np.frombuffer(measured[2].model), strict=True))
    assert first["residual_dropped"] > 0.5 * first["residual_elements"]
    assert outcome.steps == 4 + 20 - 1 + 3


@pytest.mark.slow
def test_a_study_may_build_other_optimizers_each_with_a_rate_of_its_own(trained):
    taken = []

    def build(plan, recipe):
        model = new_model(plan, recipe)
        first, *rest = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]
        optimizers[0].register_step_pre_hook(
            lambda *_: taken.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        )
        return model, optimizers

    plan, recipe = Plan("kept otherwise", "float32"), replace(RECIPE, warm_up_steps=4)
    *_, messages = trained(plan, recipe, build=build, settings={"rule": "two"}, options={"casts": ("mxfp8",)})
    assert taken == [[0.1 * factor, 1e-3 * factor] for factor in (0.25, 0.5, 0.75, *[1.0] * 9)]
    (created,) = of_kind(messages, wire.RunCreate)
    assert created.config["rule"] == "two"
    stream = of_kind(messages, wire.StreamCreate)[-1]
    assert "cast_changed/mxfp8" in stream.statistics
    assert stream.watch is not None
    assert stream.watch.strategy is None


def bytes_of(corpus):
    """The bytes to train on, and those that are held out."""
    return [part.numpy().tobytes() for part in (corpus.training, corpus.validation)]


def test_held_out_files_are_not_trained_on_and_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 Python sources"):
        standard_library(tmp_path)
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_text(f"<{index:02}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("<left out>")
    training, validation = bytes_of(standard_library(tmp_path))
    assert validation == b"<15>\n<31>"
    assert training.count(b"<") == 38
    assert b"left out" not in training
    assert b"<15>" not in training


def test_the_standard_library_is_large_enough_and_reads_the_same_twice_and_the_documentation_is_prose():
    code = standard_library()
    training, validation = bytes_of(code)
    assert bytes_of(standard_library())[0] == training
    assert len(training) > 2_000_000
    assert len(validation) > 100_000
    assert code.training.dtype == torch.uint8
    prose, held_out = bytes_of(documentation())
    assert len(prose) > 200_000
    assert len(held_out) > 20_000
    assert prose != held_out
    library = b"".join(bytes_of(standard_library(without=(DOCUMENTATION,))))
    assert len(training) + len(validation) - len(library) > len(prose)
    passage = b'The "assert" statement'
    assert passage in prose + held_out
    assert passage not in library


def test_targets_are_the_inputs_one_byte_on_and_the_last_passage_ends_with_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = batch(text, 4, 9, seed=3)
    assert inputs.shape == targets.shape == (4, 9)
    assert torch.equal(inputs + 1, targets)
    again, other = (batch(text, 4, 9, seed=seed)[0] for seed in (3, 4))
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    inputs, targets = batch(torch.arange(10, dtype=torch.uint8), 200, 8, seed=0)
    assert [inputs.min().item(), targets.max().item()] == [0, 9]
