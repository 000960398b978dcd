"""docs/architecture.md names files that exist, in the component under whose heading they stand."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|yml)|[a-z_]+/(?:[a-z_]+/)*)`", TEXT)


def test_every_named_file_exists():
    roots = [ROOT, *(path for path in ROOT.glob("*/collage_*") if path.is_dir()), ROOT / "collage_monitor"]
    assert len(NAMED) > 50
    missing = [name for name in NAMED if not any((root / name).exists() for root in roots)]
    assert not missing


def test_every_component_has_its_place():
    for component in ("agent", "server", "dashboard", "studies"):
        assert f"{component}/collage_{component}/" in TEXT
    assert "agent/collage_optim/" in TEXT
    assert "collage_monitor/" in TEXT


def test_each_path_has_at_most_ten_stations_and_no_file_twice():
    paths = re.findall(r"\n## (How [^\n]*)\n(.*?)(?=\n## )", TEXT, re.DOTALL)
    assert len(paths) == 3
    for title, section in paths:
        stations = re.findall(r"^\| (\d+) \| `([^`]+)`", section, re.MULTILINE)
        assert [int(number) for number, _ in stations] == list(range(1, len(stations) + 1)), title
        assert 0 < len(stations) <= 10, title
        assert len({file for _, file in stations}) == len(stations), title
