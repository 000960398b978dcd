"""What the build adds to pyproject.toml: the dashboard, which lies beside this folder, or in it in an sdist."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Dashboard(BuildHookInterface):
    """Packs `collage_dashboard` into wheel and sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called once a target; an editable installation has a path instead."""
        if version == "editable":
            return
        root = Path(self.root)
        folders = (root / "collage_dashboard", root.parent / "dashboard" / "collage_dashboard")
        source = next(folder for folder in folders if folder.is_dir())
        build_data["force_include"][str(source)] = "collage_dashboard"
