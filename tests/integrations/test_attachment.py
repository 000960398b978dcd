"""What the integrations share: unwrapping, errors that stay out of training, absent libraries, examples."""

import importlib
import sys

import pytest
import torch
from collage_agent import current_run
from collage_agent.error_guard import raise_in_tests
from collage_agent.integrations.attachment import Attachment, innermost
from torch import nn

from tests.forking import TORCH, run_forked

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


def test_no_framework_is_imported_by_the_agent():
    program = (
        "import sys, collage_agent, collage_agent.integrations as i; print([n for n in {0!r} if n in sys.modules])"
    )
    answer = run_forked(TORCH, "-c", program.format(FRAMEWORKS))
    assert answer.stdout.strip() == "[]"
