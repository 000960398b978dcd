"""Every example, run as a user runs it, for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_example_trains_and_gives_its_verdict(example, tmp_path):
    environment = {**os.environ, "COLLAGE_MODE": "offline", "COLLAGE_DIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, EXAMPLES / f"{example}.py", "--steps", "20"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "AdamW, bfloat16, strategy plain, step 20: " in answer.stdout
    assert "reports of run" in answer.stdout
    assert "Traceback" not in answer.stderr
