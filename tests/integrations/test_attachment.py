"""What the integrations share: unwrapping, errors that stay out of training, absent libraries, examples."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from collage_agent import current_run
from collage_agent.error_guard import raise_in_tests
from collage_agent.integrations.attachment import Attachment, innermost
from torch import nn

from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow

FRAMEWORKS = ("transformers", "lightning", "accelerate")


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrappers_are_taken_off():
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert innermost(Wrapper(Wrapper(inner))) is inner
    with pytest.raises(TypeError, match=r"optimizer=Wrapper; pass a torch\.optim\.Optimizer"):
        innermost(Wrapper("nothing"))


def test_nothing_is_raised_into_training(caplog):
    raise_in_tests(False)
    attachment = Attachment(None, None, {"mode": "nowhere"}, {})
    attachment.begin_run()
    attachment.watch(nn.Linear(2, 2), [Wrapper("nothing")])
    attachment.log({"loss": 1.0})
    attachment.end()
    assert current_run() is None
    assert "mode='nowhere'" in caplog.text
    assert "optimizer=Wrapper" in caplog.text


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_an_absent_library_is_an_error_where_it_is_asked_for(library, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    module = f"collage_agent.integrations.{library}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        importlib.import_module(module)


EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
BY_DAY = ("torch_loop", "transformers_trainer")


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in NAMES]
)
def test_the_example_trains_and_gives_its_verdict(example, tmp_path):
    """As a user runs it, for a few steps."""
    answer = run_example(tmp_path, EXAMPLES / f"{example}.py", "--steps", "20")
    assert "AdamW, bfloat16, strategy plain, step 20: " in answer.stdout
    assert " reports wait in " in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("example", NAMES)
def test_the_example_multiplies_no_16_bit_operands(example, tmp_path):
    run_example(tmp_path, "-m", "tests.narrow_products", EXAMPLES / f"{example}.py", "--steps", "2")


def run_example(folder, *arguments):
    settings = {"COLLAGE_MODE": "offline", "COLLAGE_DIR": str(folder)}
    answer = run_forked(TRAINING, *arguments, environment={**os.environ, **settings})
    assert answer.returncode == 0, answer.stderr
    return answer
