"""The first thing that a reader sees: a page's words as plain HTML, shown while the application is still loading.

The document holds its page twice: as HTML, which is shown at once, and as the layout with which the application
starts, so that it need not ask again. `assets/flow.js` reads the content of `#answers`.

`app.py` makes a `PrerenderingDash` in place of `dash.Dash`; pages only mark what is late by `with_placeholder`
(`tests/dashboard/test_prerendering.py`).
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from html import escape
from pathlib import Path
from typing import Any, Final, TypeVar

import dash
import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component
from flask import Response, request, stream_with_context
from plotly.io.json import to_json_plotly

__all__ = ["DOCUMENT", "PrerenderingDash", "static_html", "with_placeholder"]

_Part = TypeVar("_Part", bound=Component)
logger = logging.getLogger(__name__)

_GAP: Final = "<!--opening-->"
_UNFURLS: Final = re.compile("bot|facebookexternalhit|slack|whatsapp|skype|embedly|iframely", re.IGNORECASE)
"""Programs that ask what a link leads to; they read the head alone, which for others is sent before the page."""
DOCUMENT: Final = (
    """<!DOCTYPE html>
<html lang="en">
  <head>
    {%metas%}
    <title>{%title%}</title>
    <link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
    {%css%}
    <script>
      const kept = localStorage.getItem("mantine-color-scheme-value") || "auto";
      const dark = kept === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : kept === "dark";
      document.documentElement.dataset.mantineColorScheme = dark ? "dark" : "light";
      const part = new URLSearchParams(location.search).get("embed");
      if (part) document.documentElement.dataset.embed = part;
      setTimeout(() => {
        const isThere = document.querySelector("#opening, #page > *");
        if (!isThere) document.getElementById("waiting").textContent = "The server does not answer";
      }, 3000);
    </script>
  </head>
  <body>
    <div id="waiting" role="status" class="waiting late">Waiting for the server</div>
"""
    + _GAP
    + """
    {%app_entry%}
    <footer>{%config%}{%scripts%}{%renderer%}</footer>
  </body>
</html>"""
)
"""What stands around a page, as Dash fills it in."""
_TAGS: Final[Mapping[type[Component], str]] = {
    dcc.Link: "a",
    dmc.Alert: "div",
    dmc.Badge: "span",
    dmc.Code: "code",
    dmc.Paper: "div",
    dmc.Stack: "div",
    dmc.Table: "table",
    dmc.TableTbody: "tbody",
    dmc.TableTd: "td",
    dmc.TableTh: "th",
    dmc.TableThead: "thead",
    dmc.TableTr: "tr",
    dmc.Text: "p",
}
"""The HTML of components that are words. What else is no HTML element needs the application, and is left out."""
_HTML: Final = html.Div.__module__.rpartition(".")[0]
_AROUND_WORDS: Final = (dmc.MantineProvider, dmc.Tooltip)
_PASSED: Final = ("role", "title", "href", "src", "alt", "tabIndex")
_VOID: Final = frozenset({"img", "br", "hr"})


class PrerenderingDash(dash.Dash):
    """An application whose document brings its page along.

    `layout_for` makes the layout, the page in it, of pathname and search. The document's beginning is sent before
    that, so that a slow server leaves nobody before an empty window; not where `sends_at_once`: making the page
    may end the session, which the answer's head tells.
    """

    layout_for: Callable[[str, str], Component]
    sends_at_once = False

    def index(self, *args: Any, **kwargs: Any) -> Response:
        """The document: the part before each page, the page's words, and the application."""
        before, after = super().index(*args, **kwargs).split(_GAP)  # type: ignore[no-untyped-call]
        pathname, _, search = request.environ["REQUEST_URI"].partition("?")
        unfurls = _UNFURLS.search(request.headers.get("User-Agent", "")) is not None
        parts = self._parts(before, after, pathname, f"?{search}" if search else "", unfurls)
        if self.sends_at_once:
            parts = iter(list(parts))
        packed = request.accept_encodings.quality("gzip") > 0
        document = Response(stream_with_context(_packed(parts) if packed else parts), mimetype="text/html")
        document.headers["Cache-Control"] = "no-store"
        if packed:
            document.headers["Content-Encoding"] = "gzip"
        return document

    def _collect_and_register_resources(
        self, resources: list[dict[str, Any]], *more: Any, **named: Any
    ) -> list[Any]:
        """The addresses of scripts and styles; that of an own one changes with its content alone."""
        for resource in resources:
            if "asset_path" in resource:
                content = (Path(self.config.assets_folder) / resource["asset_path"]).read_bytes()
                resource["ts"] = blake2b(content, digest_size=8).hexdigest()
        found: list[Any] = super()._collect_and_register_resources(resources, *more, **named)  # type: ignore[no-untyped-call]
        return found

    def _parts(self, before: str, after: str, pathname: str, search: str, unfurls: bool) -> Iterator[str]:
        if not unfurls:
            yield before
        try:
            layout = self.layout_for(pathname, search)
            before = before.replace("</head>", f"{_preview(layout, pathname)}</head>") if unfurls else ""
            first = {"_dash-layout": layout, "_dash-dependencies": self._callback_list}
            # The page contains the answers to the application's first requests, with HTML's characters escaped.
            answers = f'<script type="application/json" id="answers">{to_json_plotly(first)}</script>'
            leads = escape(getattr(layout, "leads", ""))
            page = f'<div id="opening" data-leads="{leads}">{static_html(layout)}</div>{answers}'
        except Exception:
            logger.exception("the page at %s could not be made; the application asks for it again", pathname)
            page, before = "", before if unfurls else ""
        yield before + page + after


def _preview(layout: Component, pathname: str) -> str:
    """What a chat shows of a link (ogp.me): the page's title, its verdict in a sentence, and a run's layers over
    time."""
    parts = list(layout._traverse())  # type: ignore[no-untyped-call]
    title = next((found for part in parts if (found := getattr(part, "data-title", None))), "Collage Monitor")
    said = next((part.children[1] for part in parts if getattr(part, "className", None) == "verdict"), None)
    told = {"title": escape(str(title)), "description": re.sub("<[^>]*>", "", static_html(said))}
    shown = getattr(layout, "leads", "") or pathname
    if shown.startswith("/run/"):
        run = shown.removeprefix("/run/").partition("?")[0]
        told |= {"image": escape(f"{request.url_root}picture/{run}.png")}
    return "".join(f'<meta property="og:{name}" content="{text}">' for name, text in told.items())


def static_html(tree: Any) -> str:
    """The HTML of the parts of `tree` that can be read without the application; all text and attributes are
    escaped.

    For a component `with_placeholder`, it is the HTML of the placeholder.
    """
    return "".join(_written(tree))


def with_placeholder(part: _Part, placeholder: Component) -> _Part:
    """The component; until the application can draw it, `placeholder` describes it in words. The placeholder is not
    sent again."""
    vars(part)["words"] = placeholder
    return part


def _written(tree: Any) -> Iterator[str]:
    if isinstance(tree, (list, tuple)):
        for child in tree:
            yield from _written(child)
    elif isinstance(tree, Component):
        yield from _element(tree)
    elif tree is not None:
        yield escape(str(tree))


def _element(part: Component) -> Iterator[str]:
    tag = _tag(part)
    if hasattr(part, "words"):
        yield from _written(part.words)
    elif isinstance(part, _AROUND_WORDS):
        yield from _written(getattr(part, "children", None))
    elif tag and not getattr(part, "hidden", False):
        yield f"<{tag}{''.join(_attributes(part))}>"
        if tag not in _VOID:
            yield from _written(getattr(part, "children", None))
            yield f"</{tag}>"


def _tag(part: Component) -> str | None:
    if isinstance(part, dmc.Title):
        return f"h{part.order}"
    return _TAGS.get(type(part)) or (
        type(part).__name__.lower() if type(part).__module__.startswith(_HTML) else None
    )


def _attributes(part: Component) -> Iterator[str]:
    own = f"{type(part).__name__.lower()}-words " if type(part) in _TAGS else ""
    given: dict[str, Any] = {"class": f"{own}{getattr(part, 'className', None) or ''}".strip()}
    given |= {name.lower(): getattr(part, name, None) for name in _PASSED}
    given |= {name: value for name, value in vars(part).items() if name.startswith("aria-")}
    style = getattr(part, "style", None) or {}
    given["style"] = ";".join(f"{_hyphened(name)}:{value}" for name, value in style.items())
    for name, value in given.items():
        if value:
            yield f' {name}="{escape(str(value))}"'


def _hyphened(name: str) -> str:
    """A style's name as a sheet writes it; a variable's stays as it is."""
    return name if name.startswith("--") else "".join(f"-{c.lower()}" if c.isupper() else c for c in name)


def _packed(parts: Iterable[str]) -> Iterator[bytes]:
    """gzip, each part whole as soon as it is there: what compresses answers elsewhere waits for the end."""
    packer = zlib.compressobj(wbits=31)
    for part in parts:
        yield packer.compress(part.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()
