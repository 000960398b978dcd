"""Figures are functions from data to figure: nothing in their folder knows a client or an application."""

import ast
from pathlib import Path

import collage_dashboard.figures

FORBIDDEN = (
    "dash",
    "httpx",
    "flask",
    "collage_monitor.client",
    "collage_dashboard.server_reader",
    "collage_dashboard.pages",
)


def test_no_figure_imports_a_query_or_an_application():
    folder = Path(collage_dashboard.figures.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not any(name == word or name.startswith(f"{word}.") for word in FORBIDDEN), (path, name)
