"""docs/how-to/training-does-not-learn.md: what it quotes are sentences that the agent says."""

import ast
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
import torch

from collage_monitor.diagnosis.remedies import REMEDIES
from collage_monitor.wire import Door

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/training-does-not-learn.md").read_text()
ROWS = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| `")]
DOORS = get_args(Door)


@pytest.fixture(scope="module")
def said():
    """All texts of the agent and of the judgement, those over several lines joined."""
    files = [*(ROOT / "collage_monitor/diagnosis").glob("*.py"), *(ROOT / "agent/collage_agent").rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))


def test_what_the_page_quotes_is_said_and_it_has_each_line_that_is_advised(said):
    assert len(ROWS) == 10
    parts = [part.strip() for row in ROWS for part in row.strip("`").split("…")]
    assert [part for part in parts if part not in said] == []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "|" in line]
    told = {row[0]: row[1:] for row in rows if row[0] in REMEDIES}
    assert told == {cause: [f"`{lines[door]}`" for door in DOORS] for cause, (_, lines) in REMEDIES.items()}


@pytest.fixture(scope="module")
def called():
    """What the lines call, beside a model's own methods."""
    import transformers
    from accelerate import Accelerator
    from lightning.pytorch import Trainer

    own = ("optim.AdamW", "nn.utils.clip_grad_norm_", "optim.lr_scheduler.LinearLR", "autocast")
    names = {f"torch.{name}": attrgetter(name)(torch) for name in (*own, "autograd.set_detect_anomaly")}
    methods = ("prepare", "clip_grad_norm_", "unwrap_model")
    names |= {f"accelerator.{name}": getattr(Accelerator, name) for name in methods}
    return names | {own.__name__: own for own in (transformers.TrainingArguments, Trainer, Accelerator)}


@pytest.mark.nightly
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cause", REMEDIES)
def test_each_line_calls_what_the_framework_has(called, cause, door):
    line = REMEDIES[cause][1][door]
    tree = ast.parse(f"def configure():\n    {line}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in called:
            own = inspect.signature(called[name]).parameters
            assert {entry.arg for entry in call.keywords} <= own.keys(), name
        elif isinstance(call.func, ast.Attribute):
            assert hasattr(torch.nn.Module, call.func.attr), name
