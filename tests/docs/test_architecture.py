"""docs/architecture.md names files that exist, and every room of the components."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|yml)|[a-z_]+/(?:[a-z_]+/)*)`", TEXT)
COMPONENTS = [ROOT / "collage_monitor", *(path for path in ROOT.glob("*/collage_*") if path.is_dir())]


def test_every_named_file_exists():
    assert len(NAMED) > 50
    missing = [name for name in NAMED if not any((root / name).exists() for root in [ROOT, *COMPONENTS])]
    assert not missing


def test_every_component_has_its_floor():
    assert len(COMPONENTS) == 7
    for component in COMPONENTS:
        assert f"`{component.relative_to(ROOT)}/`" in TEXT


@pytest.mark.parametrize(
    "component", ["agent/collage_agent", "server/collage_server", "server/collage_server/store"]
)
def test_every_room_has_an_owner(component):
    rooms = [path.parent.name for path in (ROOT / component).glob("*/__init__.py")]
    prefix = "store/" if component.endswith("store") else ""
    assert not [room for room in rooms if f"`{prefix}{room}/`" not in TEXT]
