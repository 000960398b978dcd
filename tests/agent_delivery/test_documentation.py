"""docs/delivery.md names tests and limits that exist."""

import re
from pathlib import Path

from collage_agent.run_settings import DeliveryLimits

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "delivery.md").read_text()


def test_every_row_of_the_fault_table_names_a_test():
    rows = [line for line in TEXT.partition("## Fault table")[2].partition("\n## ")[0].splitlines() if "|" in line]
    assert len(rows) > 20
    assert all("`test_" in row for row in rows[2:])


def test_every_named_test_exists():
    code = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named
    assert [name for name in sorted(named) if f"def {name}(" not in code] == []


def test_the_limits_are_those_of_the_code():
    limits = DeliveryLimits()
    assert (limits.queue_steps, limits.queue_bytes) == (20_000, 64 * 2**20)
    assert (limits.batch_reports, limits.batch_bytes, limits.linger_seconds) == (500, 4 * 2**20, 0.5)
    assert (limits.connect_timeout_seconds, limits.answer_timeout_seconds, limits.retry_seconds) == (2, 10, 3)
    assert (limits.first_pause_seconds, limits.longest_pause_seconds) == (1, 30)
    assert (limits.spool_bytes, limits.finish_seconds) == (2**30, 20)
    for words in ("20,000 steps, 64 MiB", "500 reports, 4 MiB", "waits 0.5 s", "1 GiB", "| 20 s |"):
        assert words in TEXT
