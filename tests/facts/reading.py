"""What a page or a report tells: its sentences, cards and tables, read from Dash components or from HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from dash.development.base_component import Component

INLINE = {"span", "a", "link", "strong", "b", "time", "badge", "abbr"}
SILENT = {"script", "style", "code", "pre", "graph", "store", "location", "svg", "select", "multiselect", "button"}
SILENT |= {"segmentedcontrol", "slider", "aggrid", "textinput", "tabslist", "checkbox", "head"}
VOID = {"meta", "br", "img", "input", "hr", "link"}


@dataclass
class Node:
    """An element: its tag, attributes, and the elements and texts in it."""

    tag: str
    attributes: dict[str, Any]
    children: list[Node | str] = field(default_factory=list)

    def text(self) -> str:
        """All text in it, with single spaces."""
        parts = [part if isinstance(part, str) else "" if _is_mark(part) else part.text() for part in self.children]
        return " ".join(" ".join(parts).split())

    def all(self, *tags: str) -> Iterator[Node]:
        """The elements of these tags in it, itself included."""
        if self.tag in tags:
            yield self
        for part in self.children:
            if isinstance(part, Node):
                yield from part.all(*tags)


@dataclass(frozen=True)
class Card:
    """A number card: its metric, the lines of its numbers, and what stands below."""

    metric: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: its heads, and the texts of each row's cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Told = str | Card | Table


def told_by(tree: Any) -> Iterator[Told]:
    """The sentences, cards and tables of a tree of components, or of HTML, in order; titles on hover, too."""
    yield from _told(_from_html(tree) if isinstance(tree, str) else Node("root", {}, list(_from_components(tree))))


def _told(node: Node) -> Iterator[Told]:
    if node.tag in SILENT or _is_mark(node) or node.attributes.get("className") == "pace":
        return
    if "data-metric" in node.attributes:
        lines = [text for child in _leaves(node) if (text := child.text())]
        yield Card(node.attributes["data-metric"], tuple(lines[1:]))
        return
    if node.tag == "table":
        yield _table(node)
        return
    if node.tag == "dl":
        pairs = [[part.text() for part in row.all("dt", "dd")] for row in node.all("div")]
        yield Table((), tuple(tuple(pair) for pair in pairs))
        return
    inner: list[str] = []
    for part in node.children:
        if isinstance(part, str) or (part.tag in INLINE and not list(part.all("div", "p"))):
            inner.append(part if isinstance(part, str) else part.text())
            if isinstance(part, Node) and (title := part.attributes.get("title")) and title != part.text():
                yield str(title)
            continue
        yield from _sentence(inner)
        inner = []
        yield from _told(part)
    yield from _sentence(inner)
    # What is said on hover: after the name of whom it is about.
    if title := node.attributes.get("title"):
        yield str(title)


def _sentence(parts: list[str]) -> Iterator[str]:
    if text := " ".join(" ".join(parts).split()):
        yield text


def _table(node: Node) -> Table:
    rows = [[" ".join(cell.text().split()) for cell in row.all("td", "th")] for row in node.all("tr")]
    headed = bool(list(node.all("thead")))
    return Table(tuple(rows[0]) if headed else (), tuple(tuple(row) for row in rows[headed:]))


def _leaves(node: Node) -> Iterator[Node]:
    """The innermost blocks."""
    blocks = [part for part in node.children if isinstance(part, Node) and part.tag not in INLINE]
    if not blocks:
        yield node
    for part in blocks:
        yield from _leaves(part)


def _is_mark(node: Node) -> bool:
    return str(node.attributes.get("aria-hidden")) == "true"


def _from_components(tree: Any) -> Iterator[Node | str]:
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _from_components(part)
    elif isinstance(tree, Component):
        named = tree.to_plotly_json()["props"]
        children = list(_from_components(named.pop("children", None)))
        tag = tree._type.lower()
        for prefix in ("table",):
            tag = tag.removeprefix(prefix) if tag.startswith(prefix) and tag != prefix else tag
        yield Node(tag, {key: value for key, value in named.items() if value is not None}, children)
    elif tree is not None:
        yield str(tree)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("root", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        while len(self.open) > 1 and self.open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def _from_html(text: str) -> Node:
    parser = _Parser()
    parser.feed(text)
    return parser.open[0]
