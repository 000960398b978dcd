"""/openapi.json and /docs: whole, and loading nothing from anywhere."""

from __future__ import annotations

import re


def references(node):
    """Every $ref below a node."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_of_the_description_resolves(server):
    described = server.client.get("/openapi.json").json()
    for reference in set(references(described)):
        node = described
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node


def test_the_page_lists_every_route_and_loads_nothing(server):
    page = server.client.get("/docs").text
    for path in server.client.get("/openapi.json").json()["paths"]:
        assert path in page
    assert re.findall(r"""(?:src|href)=["']([^"']+)""", page) == ["/openapi.json"]
    assert "<script" not in page
