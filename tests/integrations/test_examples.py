"""Every example, run as a user runs it, for a few steps."""

import os
from pathlib import Path

import pytest

from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_example_trains_and_gives_its_verdict(example, tmp_path):
    environment = {**os.environ, "COLLAGE_MODE": "offline", "COLLAGE_DIR": str(tmp_path)}
    answer = run_forked(
        TRAINING, EXAMPLES / f"{example}.py", "--steps", "20", environment=environment, folder=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert "AdamW, bfloat16, strategy plain, step 20: " in answer.stdout
    assert "reports of run" in answer.stdout
    assert "Traceback" not in answer.stderr
