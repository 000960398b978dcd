"""The pages of docs/api/: every public name with its signature and docstring, read from the source.

`python -m tools.api_pages` writes them; a test compares the pages with its output.
"""

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("agent", ".")
"""Where packages are imported from, in this order."""
PAGES = {
    "agent": ("The agent", "import collage_agent as collage", ("collage_agent",)),
    "optimizers": ("The optimizers", "import collage_agent.optim", ("collage_optim",)),
    "numerics": ("The numerics", "import collage_agent.numerics", ("collage_optim.numerics",)),
    "client": ("The client", "from collage_monitor.client import Client", ("collage_monitor.client",)),
}
"""Title, how to import it, and the modules whose `__all__` a page lists."""
BESIDE = {"collage_agent": ("collage_agent.transport.MemoryTransport",), "collage_monitor.client": ("Connection",)}
"""Names that a page lists, too: one of a module below, and a class whose methods a public one inherits."""
RETURNED = {
    "AverageWatch": ("before", "after", "remove", "summary"),
    "Run": ("run_id", "project", "name", "address", "log", "finish", "reports_sent", "reports_dropped"),
    "Watch": ("before", "after", "step", "remove", "removed", "summary", "judgement", "averages"),
}
"""Classes that nobody makes himself, and what a training loop uses of them."""
Definition = ast.ClassDef | ast.FunctionDef
_SECTION = re.compile(r"^(Options|Raises|Returns|Yields|Arguments):\s*(.*)$")
_ENTRY = re.compile(r"^    ([\w, ]+): (.*)$")


@dataclass(frozen=True)
class Place:
    """A name's definition, and the module that has it."""

    module: str
    node: ast.stmt


def source(module: str) -> Path:
    """The file of a module."""
    path = module.replace(".", "/")
    found = (ROOT / folder / f"{path}{end}" for folder in FOLDERS for end in ("/__init__.py", ".py"))
    return next(file for file in found if file.is_file())


def statements(module: str) -> Iterator[ast.stmt]:
    """The statements of a module, with those that only a type checker runs."""
    for node in ast.parse(source(module).read_text()).body:
        yield from node.body if isinstance(node, ast.If) else [node]


def public(module: str) -> list[str]:
    """The names in a module's `__all__`."""
    for node in statements(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


def place(module: str, name: str) -> Place:
    """Where a name of a module is defined, through any number of imports."""
    for node in statements(module):
        if isinstance(node, ast.ImportFrom) and any((entry.asname or entry.name) == name for entry in node.names):
            return place(str(node.module), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return Place(module, node)
    raise LookupError(f"{module} does not define {name}")


def page(name: str) -> str:
    """A whole page."""
    title, how, modules = PAGES[name]
    head = f"# {title}\n\nGenerated from the code by `python -m tools.api_pages`. `{how}` comes first.\n"
    return "\n".join([head, *(line for module in modules for line in _module(module))])


def _module(module: str) -> Iterator[str]:
    for name in (*public(module), *BESIDE.get(module, ())):
        defining, _, last = name.rpartition(".")
        found = place(defining or module, last)
        yield f"## `{name.removeprefix(f'{module}.')}`\n"
        if isinstance(found.node, Definition):
            yield from _definition(found.node, 3)
        else:
            yield f"```python\n{ast.unparse(found.node)}\n```\n"
            yield from _text(_following_string(found))


def _definition(node: Definition, depth: int) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}\n```\n"
        yield from _text(ast.get_docstring(node))
        return
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    made = next((one for one in functions if one.name == "__init__" and node.name not in RETURNED), None)
    shown = [f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):".replace("()", "")]
    shown += [f"    {ast.unparse(one)}" for one in node.body if _is_field(one)]
    shown += ["    " + _signature(made).replace("\n", "\n    ")] if made else []
    yield "```python\n" + "\n".join(shown) + "\n```\n"
    yield from _text(ast.get_docstring(node))
    wanted = RETURNED.get(node.name)
    for one in functions:
        if one.name in wanted if wanted else not one.name.startswith("_") and ast.get_docstring(one):
            yield f"{'#' * depth} `{node.name}.{one.name}`\n"
            yield from _definition(one, depth + 1)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_")


def _signature(node: ast.FunctionDef) -> str:
    """The head of a function, one argument a line where it is long; the options of `watch` are spelt out."""
    decorators = {ast.unparse(entry) for entry in node.decorator_list}
    arguments = node.args
    words = _arguments(arguments)
    if "shows_options" in decorators:
        options = place("collage_agent.watch_options", "WatchOptions").node
        assert isinstance(options, ast.ClassDef)
        words = [*words[:-1], "*", *(ast.unparse(one) for one in options.body if _is_field(one))]
    head = "".join(f"@{entry}\n" for entry in sorted(decorators & {"property", "classmethod", "staticmethod"}))
    answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    short = f"def {node.name}({', '.join(words)}){answer}"
    if len(short) > 88:
        short = f"def {node.name}(\n    " + ",\n    ".join(words) + f",\n){answer}"
    return head + short


def _arguments(given: ast.arguments) -> list[str]:
    """Each argument with its type and default, and the marks between their kinds."""
    before = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(before) - len(given.defaults)) + list(given.defaults)
    words = [_argument(*pair) for pair in zip(before, defaults, strict=True)]
    if given.posonlyargs:
        words.insert(len(given.posonlyargs), "/")
    if given.vararg or given.kwonlyargs:
        words.append(f"*{ast.unparse(given.vararg)}" if given.vararg else "*")
    words += [_argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return words + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])


def _argument(entry: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if entry.annotation else "="
    return ast.unparse(entry) + (f"{equals}{ast.unparse(default)}" if default else "")


def _following_string(found: Place) -> str | None:
    """The docstring below a constant."""
    nodes = list(statements(found.module))
    after = next((two for one, two in pairwise(nodes) if one.lineno == found.node.lineno), None)
    value = after.value if isinstance(after, ast.Expr) else None
    return str(value.value) if isinstance(value, ast.Constant) else None


def _text(docstring: str | None) -> Iterator[str]:
    """A docstring as Markdown: its sections become bold words and lists."""
    if not docstring:
        return
    lines: list[str] = []
    in_section = False
    for line in html.escape(docstring, quote=False).splitlines():
        section, entry = _SECTION.match(line), _ENTRY.match(line)
        if section:
            in_section = True
            lines += ["", f"**{section[1]}:** {section[2]}".rstrip(), ""]
        elif in_section and entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_section and line and not line.startswith(" "):
            in_section = False
            lines += ["", line]
        else:
            lines.append(("  " + line.strip()) if in_section and line else line)
    yield re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> None:
    """Write every page again."""
    for name in PAGES:
        (ROOT / "docs/api" / f"{name}.md").write_text(page(name))


if __name__ == "__main__":
    main()
