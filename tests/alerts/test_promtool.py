"""promtool accepts the rules and their unit tests pass: fires, does not fire, warm-up, stochastic left out."""

import subprocess
from pathlib import Path

import pytest

from tests.system import require

FOLDER = Path(__file__).parents[2] / "server" / "prometheus"


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "arguments", [("check", "rules", "collage.rules.yml"), ("test", "rules", "collage.rules.test.yml")]
)
def test_rules(arguments):
    done = subprocess.run(
        [require("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case():
    text = (FOLDER / "collage.rules.test.yml").read_text()
    from collage_monitor.alerts import ALERTS

    for name in ALERTS:
        assert f'alertname="{name}", alertstate="firing"' in text or f'"{name} fires' in text
