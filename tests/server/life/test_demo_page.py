"""The site's page of the demo's five runs: made of the kept exports, it says what the README says."""

import re
from pathlib import Path

import pytest

from tests.server.life.bridge import transfer
from tools.static_demo import KEPT, made

README = (Path(__file__).parents[3] / "README.md").read_text()
ROWS = re.findall(r"^\| ([\w-]+) \| (float32|bfloat16) \| (.*) \| [^|]* \|$", README, re.MULTILINE)
METRICS = ("edq_ratio", "edq_oracle_ratio", "state_decrement_ratio/exp_avg_sq", "lost_update_ratio")


def close(cell, value):
    """Whether a cell of the README is this value, rounded as it is."""
    number = cell.removeprefix("< ").removesuffix(" %")
    scale = 100 if cell.endswith("%") else 1
    if cell.startswith("<"):
        return value * scale < float(number)
    return value * scale == pytest.approx(float(number), abs=0.51 * 10.0 ** -len(number.partition(".")[2]))


def test_the_page_of_the_demo_says_what_the_readme_says(server):
    with transfer(server) as client:
        page = made(client)
        names = {run.run_id: run.name for run in client.runs().runs}
        compared = {names[run.run_id]: run for run in client.compare(list(names), "edq_ratio").runs}
    assert not re.search(r"<script|<link|(?:src|href)=\"http", page)
    assert len(ROWS) == len(list(KEPT.glob("*.jsonl.gz"))) == 5
    for strategy, dtype, cells in ROWS:
        name, (loss, *told) = f"{strategy} {dtype}", cells.split(" | ")
        assert name in page
        found = compared[name]
        assert close(loss, found.scalars["validation_loss"].value), name
        for metric, cell in zip(METRICS, told, strict=True):
            assert close(cell, found.merged[metric]), (name, metric, cell, found.merged[metric])
