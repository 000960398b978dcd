"""docs/api lists every public name of agent, optimizers, numerics and client as the code has it."""

import ast
from importlib import import_module

import pytest

from tools import http_page
from tools.api_pages import PAGES, ROOT, page, place, public

MODULES = [module for _, _, modules in PAGES.values() for module in modules]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name):
    written = (ROOT / "docs/api" / f"{name}.md").read_text()
    assert written == page(name), "python -m tools.api_pages writes it anew"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_says_what_it_is(module):
    assert public(module) == import_module(module).__all__
    for name in public(module):
        node = place(module, name).node
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert ast.get_docstring(node), f"{module}.{name} has no docstring"


def test_the_page_of_routes_and_errors_is_what_the_server_says():
    text = http_page.PAGE.read_text()
    assert text == http_page.page(), "python -m tools.http_page writes it anew"
    routes = [
        f"### `{method.upper()} {path}`"
        for path, found in http_page.described()["paths"].items()
        for method in found
    ]
    assert len(routes) > 45
    assert all(route in text for route in routes)
    assert "`journal_full`" in text
