"""The dashboard as an object: pages, routing and guards around one way to the server. Importing it does nothing.

`command.py` and tests make it. Each page registers its own callbacks; this knows pages only by `layout` and
`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import ALL, Input, Output, State, dcc, html

from collage_dashboard.components import problem_page
from collage_dashboard.html_report import install_report
from collage_dashboard.navigation import clientside
from collage_dashboard.number_downloads import install_numbers
from collage_dashboard.pages import comparison, incident, incidents, run, runs
from collage_dashboard.pages.rail import (
    BESIDE,
    first_view,
    fleet,
    install_picture,
    newest_answer,
    rail,
    register_rail,
)
from collage_dashboard.prerendering import DOCUMENT, PrerenderingDash
from collage_dashboard.request_guard import install_compression, install_guard
from collage_dashboard.server_reader import Problem, Reader, explain
from collage_dashboard.sign_in import ClientOfToken, forget_token, install_sign_in, token_of_session
from collage_dashboard.view import Page, View, read_address, write_address
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = [
    "create_dashboard",
    "render",
]

_MISSING: Final = Problem("No such page", "There is no page at this address.")
_UNLISTED: Final[Mapping[str, Any]] = {"at": None, "runs": []}
_PAGES: Final[Mapping[Page, ModuleType]] = {
    "runs": runs,
    "compare": comparison,
    "run": run,
    "incidents": incidents,
    "incident": incident,
}
"""The module of each page: its `layout`, and the callbacks that it registers."""


def create_dashboard(
    client_factory: Callable[[], Client],
    *,
    allowed_hosts: frozenset[str] | None = None,
    sign_in: ClientOfToken | None = None,
    embed_in: Sequence[str] = (),
) -> dash.Dash:
    """A dashboard that reads through the client that `client_factory` makes on first use.

    Every file that the browser loads comes from this process. `allowed_hosts` are the names under which it answers
    (None: any); a callback must come from a page of its own. `embed_in` are the origins whose pages may show it in
    a frame (none: no page). With `sign_in` nothing is shown before a person has
    shown a token, or signed in through the server's provider. A client made with that token then replaces the
    dashboard's own, which is used only for signing people in.
    """
    app = PrerenderingDash(
        __name__,
        title="Collage Monitor",
        update_title="",
        use_pages=False,
        pages_folder="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=DOCUMENT,
        health_endpoint="healthz",
        add_log_handler=False,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    reader = Reader(client_factory)
    install_guard(app.server, allowed_hosts, embed_in)
    if sign_in is not None:
        make = sign_in
        reader = Reader(lambda: make(token_of_session()), whose=token_of_session, on_unknown=forget_token)
        install_sign_in(app.server, make, client_factory)
        app.sends_at_once = True
    install_compression(app.server)
    install_report(app.server, reader)
    install_numbers(app.server, reader)
    install_picture(app.server, reader)
    shell = partial(_shell, signed_in=sign_in is not None)
    app.layout = shell()
    app.layout_for = partial(_opened, shell, reader)
    _register_routing(app, reader)
    register_rail(app, reader)
    for page in _PAGES.values():
        page.register(app, reader)
    return app


def render(view: View, reader: Reader) -> Any:
    """The page of a view, or the problem in plain words."""
    try:
        view = _picked(view, reader)
        if view.page == "fleet":
            return fleet(view, reader)
        page = _PAGES.get(view.page)
        return problem_page(_MISSING) if page is None else page.layout(view, reader)
    except CollageError as error:
        problem = explain(error)
        return problem_page(problem, retry=problem.temporary)


def _picked(view: View, reader: Reader) -> View:
    """The view; where it names no run, that of the runs to show then.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    if view.page == "first":
        return first_view(reader)
    return newest_answer(reader) if view.page == "compare" and not view.runs else view


def _opened(shell: Callable[..., Any], reader: Reader, pathname: str, search: str) -> Any:
    """A page as it opens, with the list of runs beside it; `leads`: its own address, where it was asked for by
    another."""
    view = read_address(pathname, search)
    listed: tuple[list[Any], Mapping[str, Any]] = ([], _UNLISTED)
    leads = ""
    with suppress(CollageError):
        own = _picked(view, reader)
        if own != view or pathname == "/":
            leads, view = "".join(write_address(own)), own
        if view.page in BESIDE:
            listed = rail(view, reader)
    shown, asked = write_address(view) if leads else (pathname, search)
    layout = shell(render(view, reader), *listed, view.page, pathname=shown, search=asked)
    vars(layout)["leads"] = leads
    return layout


def _shell(
    page: Any = None,
    listed: Any = (),
    told: Mapping[str, Any] = _UNLISTED,
    name: Page = "missing",
    *,
    signed_in: bool,
    **address: str,
) -> dmc.MantineProvider:
    """The frame of all pages, around `page`, the list of runs beside it; without one, the browser sends its address
    and gets its page."""
    leave = html.Form(html.Button("Sign out", className="sign-out"), action="/sign-out", method="post")
    unpressed: dict[str, Any] = {"aria-pressed": "false"}
    named: dict[str, Any] = {"aria-label": "Runs"}
    header = html.Header(
        html.Div(
            [
                # Where these lead, the server picks what is shown: it must be asked for the document.
                html.A(
                    [html.Img(src="/assets/favicon.svg", alt=""), html.Span("Collage Monitor")],
                    href="/",
                    className="wordmark",
                ),
                html.A("Runs", href="/", className="nav"),
                html.A("Strategies", href="/compare", className="nav"),
                dcc.Link("Incidents", href="/incidents", className="nav"),
                html.Div(className="spring"),
                html.Button(
                    "Pause",
                    id="pause",
                    type="button",
                    className="pause",
                    title="Keep the page as it is: ask for nothing new",
                    **unpressed,
                ),
                *([leave] if signed_in else []),
                dmc.ColorSchemeToggle(
                    lightIcon="☀", darkIcon="☾", variant="subtle", color="gray", **{"aria-label": "Light or dark"}
                ),
            ],
            className="header",
        ),
        className="bar",
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="address", refresh=False, **address),
            dcc.Store(id="tick"),
            dcc.Store(id="retry-tick"),
            dcc.Store(id="runs-picked", storage_type="session"),
            header,
            dcc.Store(id="rail-told", data=dict(told)),
            html.Div(
                [
                    html.Aside(listed, id="rail", className="rail", **named),
                    html.Main(page, id="page", className="page"),
                ],
                id="screen",
                className=f"screen on-{name}",
            ),
        ],
        defaultColorScheme="auto",
        theme={
            "primaryColor": "blue",
            "fontFamily": 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif',
            "defaultRadius": "md",
        },
    )


def _register_routing(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("page", "children"),
        Output("screen", "className"),
        Input("address", "pathname"),
        Input("retry-tick", "data"),
        State("address", "search"),
        prevent_initial_call=True,  # The layout contains its page already, or the address counts as a change.
    )
    def show(pathname: str | None, _tick: int | None, search: str | None) -> tuple[Any, str]:
        view = read_address(pathname, search)
        return render(view, reader), f"screen on-{view.page}"

    waiting = State({"type": "retry", "index": ALL}, "id")
    clientside(app, "flow.retry", Output("retry-tick", "data"), Input("tick", "data"), waiting)
    clientside(app, "flow.title", Output("page", "title"), Input("page", "children"), prevent_initial_call=False)
