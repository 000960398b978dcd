"""What the build adds to pyproject.toml: the README with links that live on a package index.

They lead to `Repository` in `[project.urls]`. While that is not filled in, links are words alone.
"""

import runpy
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class IndexPage(MetadataHookInterface):
    """Makes `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict) -> None:
        """Called once a build."""
        root = Path(self.root)
        index_page = runpy.run_path(str(root / "tools" / "package_page.py"))["index_page"]
        text = index_page((root / "README.md").read_text(), metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
