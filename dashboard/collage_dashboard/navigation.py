"""The view of a page is its address: controls write their choices there, and panels read them from there.

`assets/view.js` does both in the browser. Each page lists its controls as `Choice`s; its panels take the store
`PAGE-shown` as their input and read it with `view_of`. `view.py` says what an address may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import dash
from dash import ClientsideFunction, Input, Output, State, dcc, html, no_update

from collage_dashboard.figures.style import digest
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View, read_address, usual, write_address
from collage_monitor.errors import CollageError

__all__ = [
    "Choice",
    "asked_of",
    "choices",
    "choices_data",
    "clears",
    "clientside",
    "or_later",
    "part",
    "pressed_button",
    "register_choices",
    "register_part",
    "view_of",
    "view_stores",
]


@dataclass(frozen=True)
class Choice:
    """What a control chooses.

    `name`: its parameter of the address; `usual`: what it shows if the address has none, the view's default unless
    given. `drops`: parameters that belong to the former choice. `is_steps`: a step or a range. `behind`: the column
    behind which an added one stands. `is_typed`: put there at a pause.
    """

    name: str
    usual: Any = None
    drops: tuple[str, ...] = ()
    is_steps: bool = False
    behind: str = ""
    is_typed: bool = False


def pressed_button() -> dict[str, Any]:
    """The id of the button that was pressed, among those with ids that match a pattern.

    Raises:
        PreventUpdate: buttons came or went, and none was pressed.
    """
    trigger = dash.ctx.triggered_id
    if not isinstance(trigger, dict) or not dash.ctx.triggered[0]["value"]:
        raise dash.exceptions.PreventUpdate
    return trigger


def choices(*names: str, **others: Choice) -> dict[str, Choice]:
    """Choices by control: each of `names` is that of its parameter, too."""
    return {name: Choice(name) for name in names} | others


def view_stores(view: View, page: str, controls: Mapping[str, Choice]) -> list[Any]:
    """The page's address, what of it is shown, and what its controls choose."""
    pathname, search = write_address(view)
    return [
        dcc.Location(id=f"{page}-address", refresh=False, search=search),
        dcc.Store(id=f"{page}-shown", data={"pathname": pathname, "search": search, "zooms": 0}),
        dcc.Store(id=f"{page}-choices", data=choices_data(page, controls)),
    ]


def choices_data(page: str, controls: Mapping[str, Choice]) -> dict[str, Any]:
    """The page's choices, as the browser keeps them."""
    found = {}
    for control, choice in controls.items():
        found[f"{page}-{control}"] = asdict(choice)
        if choice.usual is None:
            found[f"{page}-{control}"]["usual"] = usual(choice.name)
    return {"page": page, "controls": found}


def clientside(app: dash.Dash, function: str, *bound: Any, prevent_initial_call: bool = True) -> None:
    """Bind a function of the page's scripts, "NAMESPACE.NAME"."""
    own = ClientsideFunction(*function.split("."))
    app.clientside_callback(own, *bound, prevent_initial_call=prevent_initial_call)  # type: ignore[no-untyped-call]


@contextmanager
def or_later() -> Iterator[None]:
    """Leave a part of a page as it is if the server does not answer: the next look says what is wrong.

    Raises:
        PreventUpdate: it did not, or it refused.
    """
    try:
        yield
    except CollageError:
        raise dash.exceptions.PreventUpdate from None


def register_choices(app: dash.Dash, page: str, controls: Iterable[str]) -> None:
    """Bind the page's address and these controls to each other."""
    clientside(
        app,
        "view.choose",
        *(Input(f"{page}-{control}", "value") for control in controls),
        State(f"{page}-choices", "data"),
    )
    clientside(
        app,
        "view.follow",
        Input(f"{page}-address", "search"),
        Input(f"{page}-choices", "data"),
        State(f"{page}-address", "pathname"),
        State(f"{page}-shown", "data"),
    )


def clears(text: str, page: str, *names: str, **more: Any) -> html.Button:
    """A button that takes these parameters out of the page's address."""
    named: dict[str, Any] = {"data-page": page, "data-clears": " ".join(names)}
    return html.Button(text, type="button", **named, **more)


def view_of(shown: Mapping[str, Any]) -> View:
    """The view that a page shows."""
    return read_address(shown["pathname"], shown["search"])


def part(place: str, content: Any = None, asked: Any = None) -> list[Any]:
    """The place of a part of a page; with `content`, which shows what `asked` holds, until something changes."""
    told = {"asked": asked, "digest": digest(content)}
    return [html.Div(content, id=place), dcc.Store(id=f"{place}-told", data=told)]


def register_part(
    app: dash.Dash,
    reader: Reader,
    place: str,
    source: str,
    fields: Sequence[str],
    make: Callable[[View, Reader, Mapping[str, Any]], Any],
) -> None:
    """Bind the place of a part to what it shows: a function of the view, the server and the data of store `source`.

    It is made again if one of these fields of the view, or the revision "at" of the data, changes; it is sent if it
    differs from what is there.
    """

    @app.callback(
        Output(place, "children"),
        Output(f"{place}-told", "data"),
        Input(f"{place.partition('-')[0]}-shown", "data"),
        Input(source, "data"),
        State(f"{place}-told", "data"),
    )
    def tell(shown: dict[str, Any], now: dict[str, Any], told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        view = view_of(shown)
        asked = asked_of(view, now, fields)
        if now["failed"] or asked == told["asked"]:
            raise dash.exceptions.PreventUpdate
        with or_later():
            content = make(view, reader, now)
        found = digest(content)
        return no_update if found == told["digest"] else content, {"asked": asked, "digest": found}


def asked_of(view: View, now: Mapping[str, Any], fields: Sequence[str]) -> str:
    """What a part depends on: these fields of the view, and a revision."""
    return digest([now["at"], *(getattr(view, name) for name in fields)])
