"""`collage-monitor audit`: text for people, JSON for programs, and its status."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from collage_agent.audit import CheckpointError
from collage_agent.command.audit import audit
from collage_agent.command.sync import sync

from tests.audit.checkpoints import saved, trained


def audited(path, *options):
    return CliRunner().invoke(audit, [str(path), *options])


@pytest.fixture
def plain(tmp_path):
    return saved(tmp_path / "plain.pt", *trained(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5)))


def test_text_names_what_is_kept_what_is_wrong_and_what_to_do(plain):
    answer = audited(plain)
    assert answer.exit_code == 0, answer.output
    assert "plain: 6 parameters, 2,064 weights, 6 bytes a weight without gradients" in answer.output
    assert "weight bfloat16, exp_avg bfloat16, exp_avg_sq bfloat16" in answer.output
    assert "problem: the second moment is one bfloat16 number with beta2 = 0.999" in answer.output
    assert "at learning rate 1e-05 (lr of the checkpoint)" in answer.output
    assert "what to do:" in answer.output
    assert "nothing here proves a run healthy" in answer.output


def test_a_given_rate_replaces_the_checkpoints(plain):
    answer = json.loads(audited(plain, "--learning-rate", "0.5", "--json").output)
    assert (answer["learning_rate"], answer["learning_rate_from"]) == (0.5, "given")
    assert answer["total"]["lost_ratio"] == 0.0
    assert len(answer["layers"]) == 6
    assert {finding["code"] for finding in answer["findings"]} >= {"single-weight", "second-moment-stuck"}


def test_strict_turns_a_problem_into_a_status(plain, tmp_path):
    assert audited(plain, "--strict").exit_code == 1
    model, optimizer = trained(lambda model: torch.optim.AdamW(model.parameters()), dtype=torch.float32)
    answer = audited(saved(tmp_path / "whole.pt", model, optimizer), "--strict")
    assert answer.exit_code == 0, answer.output
    assert "nothing that stands out" in answer.output


@pytest.mark.parametrize(("verb", "option"), [(audit, []), (sync, ["--dir"])])
def test_what_is_not_there_is_said_before_anything_is_loaded_or_asked(tmp_path, verb, option, monkeypatch):
    monkeypatch.setitem(sys.modules, "collage_agent.audit", None)
    answer = CliRunner().invoke(verb, [*option, str(tmp_path / "nowhere")])
    assert answer.exit_code == 2
    assert "nowhere' does not exist" in answer.output


def test_a_wrong_rate_is_a_usage_error(plain):
    answer = audited(plain, "--learning-rate", "-1")
    assert answer.exit_code == 2
    assert "pass a number above 0" in answer.output


def test_an_error_in_reading_is_ours_and_not_blamed_on_the_rate(plain, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert isinstance(audited(tmp_path / "empty").exception, CheckpointError)

    def broken(parameters):
        raise ValueError("of another kind")

    monkeypatch.setattr("collage_agent.audit.checkpoint_audit.findings_of", broken)
    answer = audited(plain)
    assert "--learning-rate" not in answer.output
    assert isinstance(answer.exception, ValueError)
