"""Every example, run as a user runs it, for a few steps."""

import os
from pathlib import Path

import pytest

from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
BY_DAY = ("torch_loop", "transformers_trainer")


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in NAMES]
)
def test_the_example_trains_and_gives_its_verdict(example, tmp_path):
    environment = {**os.environ, "COLLAGE_MODE": "offline", "COLLAGE_DIR": str(tmp_path)}
    answer = run_forked(
        TRAINING, EXAMPLES / f"{example}.py", "--steps", "20", environment=environment, folder=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert "AdamW, bfloat16, strategy plain, step 20: " in answer.stdout
    assert " reports wait in " in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("example", NAMES)
def test_the_example_multiplies_no_16_bit_operands(example, tmp_path):
    environment = {**os.environ, "COLLAGE_MODE": "offline", "COLLAGE_DIR": str(tmp_path)}
    program = ("-m", "tests.narrow_products", EXAMPLES / f"{example}.py", "--steps", "2")
    answer = run_forked(TRAINING, *program, environment=environment)
    assert answer.returncode == 0, answer.stderr
