"""`collage-monitor run`: programs as they are, watched; and programs that must not notice."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from collage_agent import finish, init, watch
from collage_agent.expectations import BREACH_EXIT_STATUS
from collage_agent.integrations import attach
from collage_agent.transport import MemoryTransport
from torch import nn

from collage_monitor.command.run import run
from collage_monitor.environment import ATTACH, launch_variables
from tests import forking
from tests.forking import TORCH, command, fork, run_command, run_forked
from tests.launching.forked import TRAINING, bootstrap, forked_python, launched, python, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def forked():
    """An interpreter that costs no import of torch. Who really starts one calls `python`."""
    with forked_python() as path:
        yield path


def digest_of(answer):
    assert answer.returncode == 0, answer.stderr
    return next(line for line in answer.stdout.splitlines() if line.startswith("digest"))


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    """The training as it is without us, once."""
    folder = tmp_path_factory.mktemp("unwatched")
    return run_forked(TORCH, write(folder, TRAINING), folder=folder)


def test_a_program_is_watched_and_its_training_is_bit_identical(unwatched, tmp_path):
    """Also where it keeps what it is expected to keep."""
    script = write(tmp_path, TRAINING)
    options = ["--every", 3, "--expect", "plain", "--on-breach", "exit"]
    watched = launched(tmp_path, *python(script), options=options, forked=False, PYTHONWARNINGS="error")
    assert digest_of(watched) == digest_of(unwatched)
    assert "collage" not in unwatched.stdout
    assert "broken" not in watched.stdout + watched.stderr
    assert "AdamW, bfloat16, strategy plain, step 18: " in watched.stdout
    assert "0.weight" in watched.stdout
    assert "run train: " in watched.stdout


def test_the_environment_alone_does_the_same(forked, tmp_path):
    answer = CliRunner().invoke(run, ["--print-environment", "--json", "--every", "5", "--name", "by environment"])
    variables = json.loads(answer.output)
    script = write(tmp_path, TRAINING)
    watched = launched(tmp_path, forked, script, watched=False, **variables)
    assert "run by environment: " in watched.stdout
    exported = CliRunner().invoke(run, ["--print-environment", "--name", "two words"]).output
    assert "export COLLAGE_RUN_NAME='two words'\n" in exported


def test_the_status_of_the_program_is_passed_on(forked, tmp_path):
    assert launched(tmp_path, *python("-c", "raise SystemExit(7)")).returncode == 7
    failing = launched(tmp_path, forked, write(tmp_path, TRAINING + "raise KeyError('mine')"))
    assert failing.returncode == 1
    assert "KeyError: 'mine'" in failing.stderr


def test_a_program_that_does_not_keep_what_was_expected_ends_where_that_was_asked_for(forked, unwatched, tmp_path):
    script = write(tmp_path, TRAINING)
    expecting = ["--expect", "weights=float32,states=float32", "--on-breach"]
    ended = launched(tmp_path, forked, script, options=[*expecting, "exit"])
    assert ended.returncode == BREACH_EXIT_STATUS, ended.stderr
    assert "digest" not in ended.stdout
    broken = "expectation broken: expected weights in float32, kept are bfloat16 (weights and states, rounded to "
    assert broken in ended.stderr
    assert "expected states in float32, kept are exp_avg in bfloat16 and exp_avg_sq in bfloat16" in ended.stdout
    warned = launched(tmp_path, forked, script, options=[*expecting, "warn"])
    assert digest_of(warned) == digest_of(unwatched)
    assert warned.stderr.count("expectation broken") == 1


def test_a_signal_reaches_the_program(tmp_path):
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); "
        "time.sleep(600)"
    )
    process = fork(forking.TRAINING, *command("run", "--")[1:], *python("-c", program), folder=tmp_path)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 5


def test_a_program_without_torch_notices_nothing(tmp_path):
    program = (
        "import sys, json; print([n for n in ('torch', 'collage_agent', 'numpy') if n in sys.modules], sys.path)"
    )
    plain = launched(tmp_path, *python("-c", program), watched=False)
    watched = launched(tmp_path, *python("-c", program))
    assert watched.stdout == plain.stdout
    assert watched.stdout.startswith("[]")
    assert watched.stderr == ""


def test_torch_without_an_optimizer_loads_no_agent_and_the_sites_own_customization_still_runs(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    write(own, "import builtins; builtins.customized = 'yes'", "sitecustomize.py")
    program = (
        "import sitecustomize, sys, torch; print(customized, sitecustomize.__file__); "
        "print('collage_agent' in sys.modules, type(torch.__spec__.loader).__name__)"
    )
    answer = launched(tmp_path, *python("-c", program), PYTHONPATH=str(own))
    assert answer.stdout.split() == ["yes", str(own / "sitecustomize.py"), "False", "SourceFileLoader"]


RELEASING = """
import torch

class Releasing(torch.optim.SGD):
    def step_parameter(self, parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad.sign(), alpha=1e-5)
        parameter.grad = None

def main(has_optimizer, hook, frees):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    if has_optimizer:
        optimizer = Releasing(model.parameters(), lr=1.0)
        for parameter in model.parameters():
            getattr(parameter, hook)(lambda own: optimizer.step_parameter(own) if frees else None)
    for _ in range(40):
        model(torch.randn(2, 8).to(torch.bfloat16)).square().sum().backward()
    print("kept", sum(parameter.double().sum() for parameter in model.parameters()).item())
    print("hooks", [len(own._post_accumulate_grad_hooks or ()) for own in model.parameters()])

main({}, {!r}, {})
"""


@pytest.mark.parametrize(
    ("has_optimizer", "hook"),
    [
        (True, "register_hook"),
        (True, "register_post_accumulate_grad_hook"),
        pytest.param(False, "register_hook", marks=pytest.mark.nightly),
    ],
)
def test_an_optimizer_whose_step_is_never_called_is_told_of_at_the_end(has_optimizer, hook, tmp_path):
    """It is gone by then: the program ended as if nothing was missed."""
    answer = launched(tmp_path, *python(write(tmp_path, RELEASING.format(has_optimizer, hook, False))))
    assert answer.returncode == 0
    assert ("step() of Releasing was never called: if hooks step" in answer.stderr) == has_optimizer
    assert answer.stderr.count("collage:") == has_optimizer


def test_steps_that_hooks_take_in_the_backward_pass_are_measured(forked, tmp_path):
    """Told was at the end that step() was never called, and nothing was measured."""
    script = write(tmp_path, RELEASING.format(True, "register_post_accumulate_grad_hook", True))
    plain, watched = (launched(tmp_path, forked, script, watched=own) for own in (False, True))
    (kept, hooks), (same, ours) = (answer.stdout.splitlines()[:2] for answer in (plain, watched))
    assert (same, hooks, ours) == (kept, "hooks [1, 1]", "hooks [2, 2]")
    assert "Releasing, bfloat16, strategy unknown, step 30: losing updates" in watched.stdout
    assert "its parameters are stepped one by one in the backward pass: one pass is one step" in watched.stdout
    assert "never called" not in watched.stderr


def test_an_interpreter_without_the_agent_trains_unwatched_and_says_so(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write(folder, "raise ImportError('not installed here')", "collage_agent.py")
    answer = launched(tmp_path, *python(write(folder, TRAINING)))
    assert "digest" in answer.stdout
    assert answer.stderr.count("runs unwatched") == 1
    assert "not installed here" in answer.stderr


def test_a_training_that_watches_by_itself_is_not_watched_twice(forked, tmp_path):
    mine = TRAINING.replace(
        "losses = []",
        "import collage_agent\ncollage_agent.init(name='mine')\ncollage_agent.watch(model, optimizer)\nlosses = []",
    )
    answer = launched(tmp_path, forked, write(tmp_path, mine))
    assert answer.stdout.count("strategy plain") == 1
    assert "run mine: " in answer.stdout


@pytest.mark.nightly
def test_a_compiled_step_still_trains(tmp_path):
    compiled = TRAINING.replace("    optimizer.step()", "    step_function()").replace(
        "losses = []", "step_function = torch.compile(optimizer.step, backend='eager')\nlosses = []"
    )
    answer = launched(tmp_path, *python(write(tmp_path, compiled)))
    assert "digest" in answer.stdout, answer.stderr


@pytest.mark.parametrize(
    ("arguments", "told", "status"),
    [
        ([], "say what to run", 2),
        (["--", "no-such-program-here"], "no such program", 127),
        (["--", "./train.py"], "collage-monitor run -- python", 126),
        (["--every", "0", "--", "true"], "0 is not in the range", 2),
    ],
)
def test_what_cannot_be_started_is_a_sentence(tmp_path, arguments, told, status):
    write(tmp_path, TRAINING)
    answer = run_command(forking.TRAINING, "run", *arguments, folder=tmp_path)
    assert answer.returncode == status, "as a shell answers"
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_bootstrap_folder_comes_first_and_once():
    environment = launch_variables({"PYTHONPATH": f"{bootstrap()}{os.pathsep}/mine"})
    assert environment["PYTHONPATH"] == f"{bootstrap()}{os.pathsep}/mine"
    assert launch_variables({}).keys() == {"PYTHONPATH", ATTACH}


def test_launching_costs_no_torch():
    verb = "from collage_monitor.command import root; root(['run', '--print-environment'], standalone_mode=False)"
    program = f"{verb}; import sys; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"


def test_the_outermost_module_that_holds_the_parameters_is_found():
    inner = nn.Linear(3, 3)
    outer = nn.ModuleDict({"body": nn.Sequential(inner, nn.Linear(3, 1))})
    other = nn.Linear(3, 3)
    assert attach.find_model(torch.optim.SGD(outer.parameters())) is outer
    assert attach.find_model(torch.optim.SGD(inner.parameters())) is outer
    assert attach.find_model(torch.optim.SGD(other.parameters())) is other


def test_without_a_module_names_come_from_the_groups():
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    named = torch.optim.SGD([("block.0.weight", weights[0]), ("block.0.bias", weights[1])], lr=0.1)
    names = [name for name, _ in attach.find_model(named).named_parameters()]
    assert names == ["block.0.weight", "block.0.bias"]
    assert list(attach.find_model(torch.optim.SGD(weights)).parameters()) == []


class Container(torch.optim.Optimizer):
    """Steps others, as some training libraries do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for optimizer in inner for g in optimizer.param_groups for p in g["params"]], {})

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(attach, "_AUTOMATIC", attach._AutomaticWatches())
    transport = MemoryTransport()
    init("tests", transport=transport)
    yield transport
    finish()


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    attach.step_begins(optimizer)
    optimizer.step()


def watched_by(optimizer):
    return len(optimizer._optimizer_step_pre_hooks)


def test_the_first_step_is_seen_and_each_optimizer_is_watched_once(fresh):
    """Also one that the training watches by itself."""
    models = [nn.Linear(4, 4), nn.Linear(2, 2)]
    optimizer, own = (torch.optim.AdamW(model.parameters()) for model in models)
    for _ in range(10):
        stepped(optimizer)
    watch(models[1], own)
    stepped(own)
    assert (watched_by(optimizer), watched_by(own)) == (1, 1)
    finish()
    assert [report.step for report in fresh.reports if report.statistics is not None] == [1, 10, 1]


def test_containers_are_passed_over_for_what_they_hold(fresh):
    models = [nn.Linear(4, 4), nn.Linear(2, 2)]
    inner = [torch.optim.SGD(model.parameters()) for model in models]
    container = Container(inner)
    stepped(container)
    for optimizer in inner:
        stepped(optimizer)
    assert watched_by(container) == 0
    assert [watched_by(optimizer) for optimizer in inner] == [1, 1]


@pytest.mark.parametrize("alone", [True, False])
def test_an_optimizer_for_each_parameter_does_not_become_a_watch_for_each(fresh, caplog, alone):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    parts = [[own] for own in model.parameters()] if alone else [list(layer.parameters()) for layer in model]
    optimizers = [torch.optim.SGD(part) for part in parts]
    for optimizer in optimizers:
        stepped(optimizer)
    assert sum(map(watched_by, optimizers)) == (20 if alone else 8)
    assert caplog.text.count("further ones are left alone") == (0 if alone else 1)
