"""The page docs/troubleshooting.md: what the project says when something fails, why, and what to do.

`tools/troubleshooting.toml` groups the messages by cause; the messages themselves are read from the code, so that a
search for the words on a screen finds the cause. `python -m tools.troubleshooting_page` writes the page; a test
compares it with its output.
"""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("collage_monitor", "agent", "server/collage_server", "dashboard")
HEAD = """# Troubleshooting by message

Search this page for a few words of the message; `…` stands for a name, a number or a path. Above the messages stand
their cause and what to do. `python -m tools.troubleshooting_page` makes this page from the code.

If nothing failed but the loss stays where it is: [my training does not learn](how-to/training-does-not-learn.md).
"""
_ANY = "…"
_SILENT = {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "PreventUpdate", "SystemExit"}
"""Errors that no reader meets as words of ours."""
_LOGGED = {"warning", "error", "exception", "warn"}
_SAID = {"_say": 0, "kind": 0, "warn_once": 1}
"""Functions that report their argument to a person, and which one."""
_FORMAT = re.compile(r"%(?:\(\w+\))?[.\d]*[sdrfg]")
_LEAST_WORDS = {"echo": 4}
"""Fewer say too little to be found by; `echo` also prints what is no fault. 2 of all others."""
_MOST_FORMS, _DEEPEST = 4, 4
"""A part of a message that has more forms than these, or lies deeper behind names, becomes …."""
_YIELDED = {"agent/collage_optim/range_guards.py"}
"""Modules whose findings are yielded, to be logged elsewhere."""
_TABLES = {"agent/collage_agent/transport/report_counts.py": "_WHY"}
"""Modules that keep the words for their reasons in a table, and its name."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the module's path from the root, the function that says it, and its text."""

    path: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Cause:
    """A section of the page: its heading, why its messages come, what to do, and the messages."""

    title: str
    why: str
    next: str
    messages: tuple[str, ...]

    @property
    def id(self) -> str:
        """The heading's anchor on the page."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


@cache
def messages() -> tuple[Message, ...]:
    """Every message of the installed packages, in the order of their modules."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    kinds = {kind for tree in trees.values() for kind in _error_kinds(tree)} - _SILENT
    return tuple(message for path, tree in trees.items() for message in _Reader(path, tree, kinds).found())


def causes() -> list[Cause]:
    """The sections, with the messages of their modules.

    Raises:
        ValueError: a message belongs to no section, or a place that a section names has none.
    """
    entries: list[dict[str, Any]] = tomllib.loads((ROOT / "tools" / "troubleshooting.toml").read_text())["cause"]
    places = {place: entry["title"] for entry in entries for place in entry["in"]}
    used: set[str] = set()
    by_cause: dict[str, set[str]] = {entry["title"]: set() for entry in entries}
    for message in messages():
        where = f"{message.path}:{message.place}"
        known = [place for place in places if where.startswith(place)]
        if not known:
            raise ValueError(f"{where}: {message.text!r} belongs to no cause; name its module in one")
        place = max(known, key=len)
        used.add(place)
        by_cause[places[place]].add(message.text)
    if idle := [place for place in places if place not in used]:
        raise ValueError(f"no message comes from {', '.join(idle)}; remove them")
    return [
        Cause(entry["title"], entry["why"], entry["next"], tuple(sorted(by_cause[entry["title"]], key=_order)))
        for entry in entries
    ]


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for cause in causes():
        listed = "\n".join(f"- {_code(text)}" for text in cause.messages)
        parts.append(f"## {cause.title}\n\n{cause.why}\n\n**What to do.** {cause.next}\n\n{listed}\n")
    return "\n".join(parts)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{' ' if text.startswith('`') else ''}{text}{' ' if text.endswith('`') else ''}{fence}"


def _order(text: str) -> str:
    return text.lstrip("…: ").lower()


def _error_kinds(tree: ast.Module) -> Iterator[str]:
    """The names of the classes of which the module raises objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _name(node.exc.func)
            if name.lstrip("_")[:1].isupper():
                yield name


def _name(function: ast.expr) -> str:
    """The last part of a dotted name; "" for other expressions."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _pairs(
    assigned: ast.Assign | ast.AnnAssign | ast.NamedExpr, value: ast.expr
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with its value; the parts of a tuple by themselves."""
    for target in assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def _raises_words(call: ast.Call) -> bool:
    return bool(call.args) and _name(call.func) not in _SILENT


class _Reader:
    """Reads the messages of one module."""

    def __init__(self, path: str, tree: ast.Module, kinds: set[str]) -> None:
        self._path, self._tree, self._kinds = path, tree, kinds
        self._functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def found(self) -> Iterator[Message]:
        raised = {id(node.exc) for node in ast.walk(self._tree) if isinstance(node, ast.Raise)}
        for place, scope, call in self._calls(self._tree, "", self._tree):
            if isinstance(call, ast.Yield):
                spoken, least = call.value, 2
            else:
                spoken = call.args[0] if id(call) in raised and _raises_words(call) else self._spoken(call)
                least = _LEAST_WORDS.get(_name(call.func), 2)
            for text in () if spoken is None else self._texts(spoken, scope, 0):
                plain = " ".join(_FORMAT.sub(_ANY, text).replace("%%", "%").split())
                plain = re.sub(f"(?:{_ANY})+", _ANY, plain)
                words = {word for word in plain.split() if re.search(r"[^\W\d_]{2}", word)}
                if len(words) >= least:
                    yield Message(self._path, place, plain)
        if self._path in _TABLES:
            for table in self._values(_TABLES[self._path], self._tree):
                for reason in ast.literal_eval(table).values():
                    yield Message(self._path, "", reason)

    def _calls(
        self, node: ast.AST, place: str, scope: ast.AST
    ) -> Iterator[tuple[str, ast.AST, ast.Call | ast.Yield]]:
        said = ast.Call | ast.Yield if self._path in _YIELDED else ast.Call
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                named = f"{place}.{inner.name}".lstrip(".")
                yield from self._calls(inner, named, scope if isinstance(inner, ast.ClassDef) else inner)
            else:
                if isinstance(inner, said):
                    yield place, scope, inner
                yield from self._calls(inner, place, scope)

    def _spoken(self, call: ast.Call) -> ast.expr | None:
        """The argument that a person reads."""
        name, position = _name(call.func), 0
        if name in _SAID:
            position = _SAID[name]
        elif name == "echo":
            if not any(keyword.arg == "err" for keyword in call.keywords):
                return None
        elif name not in self._kinds and not (name in _LOGGED and isinstance(call.func, ast.Attribute)):
            return None
        return call.args[position] if len(call.args) > position else None

    def _texts(self, node: ast.expr, scope: ast.AST, depth: int) -> set[str]:
        """What the expression may be: texts with … for what is not known here."""
        if depth > _DEEPEST:
            return {_ANY}
        if isinstance(node, ast.Constant):
            return {node.value if isinstance(node.value, str) else _ANY}
        if isinstance(node, ast.JoinedStr):
            parts = [self._texts(part, scope, depth) for part in node.values]
            return {"".join(one) for one in itertools.product(*parts)}
        if isinstance(node, ast.FormattedValue):
            forms = {text if " " in text else _ANY for text in self._texts(node.value, scope, depth + 1)}
            return forms if len(forms) <= _MOST_FORMS else {_ANY}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._texts(node.left, scope, depth + 1), self._texts(node.right, scope, depth + 1)
            return {one + two for one in left for two in right}
        alternatives = [self._texts(one, inner, depth + 1) for one, inner in self._alternatives(node, scope)]
        return set().union(*alternatives) if alternatives else {_ANY}

    def _alternatives(self, node: ast.expr, scope: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
        """The expressions whose value this one may have, and the function in which each of them stands."""
        if isinstance(node, ast.IfExp):
            yield from ((node.body, scope), (node.orelse, scope))
        if isinstance(node, ast.BoolOp):
            yield from ((value, scope) for value in node.values)
        if isinstance(node, ast.Name):
            yield from ((value, scope) for value in self._values(node.id, scope))
        if isinstance(node, ast.Call):
            made = self._functions.get(_name(node.func))
            if made is not None:
                yield from (
                    (one.value, made) for one in ast.walk(made) if isinstance(one, ast.Return) and one.value
                )
            elif _name(node.func) in {"printable", "str"}:
                yield from ((value, scope) for value in node.args[:1])

    def _values(self, name: str, scope: ast.AST) -> Iterator[ast.expr]:
        """What the name is set to, in this function or in the module."""
        for one in [*ast.walk(scope), *self._tree.body]:
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.NamedExpr) and one.value is not None:
                yield from (value for target, value in _pairs(one, one.value) if _name(target) == name)


def main() -> None:
    """Write the page again."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
