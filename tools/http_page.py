"""The page docs/api/http.md: every route with its parameters, bodies and answers, and every error, from the server.

`python -m tools.http_page` writes it; a test compares it with its output.
"""

import html
import secrets
import tempfile
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from collage_server.app import create_app
from collage_server.errors import ServerError, UnsafeAddress
from collage_server.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "api" / "http.md"
HEAD = """# HTTP

Generated from the server by `python -m tools.http_page`; a server shows the same at `/docs`.

- A request brings its token as `Authorization: Bearer TOKEN`; [access](../access.md) says which role may do what.
- Bodies are JSON or msgpack, by `Content-Type`.
- Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity" in JSON; what is undefined is null.
"""
ERRORS = """## Errors

Each error is `{"error": {"code", "message", "field", "limit", "request_id"}}`. The message says what to do.

| status | code | when |
|---|---|---|"""


def described() -> dict[str, Any]:
    """The description that a server gives of itself; nothing is opened for it."""
    with tempfile.TemporaryDirectory() as folder:
        description: dict[str, Any] = create_app(
            Settings(folder=Path(folder), token=secrets.token_urlsafe(32))
        ).openapi()
    return description


def page() -> str:
    """The whole page: routes by subject, then messages and errors."""
    description = described()
    by_tag: dict[str, list[str]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            section = by_tag.setdefault(operation.get("tags", ["health"])[0], [])
            section += _route(f"{method.upper()} {path}", operation)
    parts = [line for tag, lines in by_tag.items() for line in (f"## {tag.capitalize()}\n", *lines)]
    messages = [line for entry in sorted(description["components"]["schemas"].items()) for line in _message(*entry)]
    return "\n".join([HEAD, *parts, "## Messages\n", *messages, *_errors()]).rstrip() + "\n"


def _route(name: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### `{name}`\n"
    yield html.escape(cleandoc(operation.get("description", "")), quote=False) + "\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | | type | |\n|---|---|---|---|"
        yield from (_parameter(entry) for entry in parameters)
        yield ""
    if body := _kind(operation.get("requestBody", {})):
        yield f"Body: {body}.\n"
    answers = {status: _kind(answer) for status, answer in operation["responses"].items() if status.startswith("2")}
    yield "Answers: " + ", ".join(f"{status} {kind}".strip() for status, kind in sorted(answers.items())) + ".\n"


def _parameter(entry: dict[str, Any]) -> str:
    schema = entry["schema"]
    default = f" Default: `{schema['default']}`." if schema.get("default") is not None else ""
    text = html.escape(entry.get("description", ""), quote=False).replace("|", "\\|")
    place = entry["in"] + (", required" if entry.get("required") and entry["in"] != "path" else "")
    return f"| `{entry['name']}` | {place} | {_type(schema)} | {text}{default} |"


def _message(name: str, schema: dict[str, Any]) -> Iterator[str]:
    fields = schema.get("properties", {})
    if fields and "ValidationError" not in name:
        yield f"### `{name}`\n"
        yield html.escape(cleandoc(schema.get("description", "")), quote=False) + "\n"
        yield "| field | | type |\n|---|---|---|"
        needed = schema.get("required", [])
        yield from (
            f"| `{key}` | {'required' * (key in needed)} | {_type(entry)} |" for key, entry in fields.items()
        )
        yield ""


def _type(schema: dict[str, Any]) -> str:
    """A type in a word or two, with its bounds."""
    if choices := [entry for entry in schema.get("anyOf", []) if entry.get("type") != "null"]:
        return _type(choices[0])
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f"`{name}`"
    if schema.get("enum"):
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"{_type(schema.get('items', {}))}, repeated"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low} to {high}" if low is not None and high is not None and high < 2**31 else ""
    return f"{schema.get('type', 'any')}{bounds}"


def _kind(answer: dict[str, Any]) -> str:
    """The name of a body's or an answer's type, or its media type."""
    for media, content in answer.get("content", {}).items():
        reference = content.get("schema", {}).get("$ref", "")
        return f"`{reference.rpartition('/')[2]}`" if reference else f"`{media}`"
    return ""


def _errors() -> Iterator[str]:
    yield ERRORS
    kinds: list[type[ServerError]] = [ServerError, *ServerError.__subclasses__()]
    kinds += [below for kind in kinds[1:] for below in kind.__subclasses__()]
    for kind in sorted(
        (kind for kind in kinds if kind is not UnsafeAddress), key=lambda kind: (kind.status, kind.code)
    ):
        said = (
            "A fault of the server; its log has the request's id."
            if kind is ServerError
            else cleandoc(kind.__doc__ or "")
        )
        yield f"| {kind.status} | `{kind.code}` | {' '.join(said.split())} |"


def main() -> None:
    """Write the page again."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
