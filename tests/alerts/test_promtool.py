"""promtool accepts the rules and their unit tests pass: fires, does not fire, warm-up, stochastic left out."""

import subprocess
from pathlib import Path

import pytest

from collage_monitor.alerts import ALERTS
from tests.system import require
from tests.waiting import PATIENCE_SECONDS

FOLDER = Path(__file__).parents[2] / "server" / "prometheus"


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "collage.rules.yml"),
        ("test", "rules", "collage.rules.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments):
    done = subprocess.run(
        [require("promtool"), *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_cases():
    text = (FOLDER / "collage.rules.test.yml").read_text()
    for name in ALERTS:
        assert f'name: "{name} fires' in text
        assert f'alertname="{name}"' in text
