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
    assert "collage_monitor/" in TEXT
