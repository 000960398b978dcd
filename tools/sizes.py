"""The size check: modules and functions stay small enough to read, code that changes together is together, and the
whole does not grow.

Prints the figures of all and of each package, ends with 1 on a breach.
"""

import ast
import statistics
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
FOLDERS = ("collage_monitor", "agent", "server", "dashboard", "studies", "benchmarks", "tools")
PACKAGES = {
    "collage_monitor": ".",
    "collage_agent": "agent",
    "collage_optim": "agent",
    "collage_server": "server",
    "collage_dashboard": "dashboard",
    "collage_demo": "studies",
    "collage_studies": "studies",
}
"""Import name and the folder that it is imported from."""
MEDIAN_MODULE, LONGEST_MODULE = 200, 500
USUAL_FUNCTION, LONGEST_FUNCTION, USUAL_SHARE = 40, 100, 0.95
SINGLE_IMPORTERS = 80
"""Modules that only one other imports: a few are parts with a purpose of their own, many are slivers."""
BUDGETS = {
    "collage_monitor": 15687,
    "collage_agent": 24980,
    "collage_optim": 7205,
    "collage_server": 26642,
    "collage_dashboard": 9837,
    "tests": 71566,
    "words of pages": 48000,
    "pages that people write": 43,
}
"""Lines of Python, words of the pages that people write, and how many pages of the site these are.

A commit that raises one says what it buys.
"""
SLACK = 0.01
"""A budget that far above its count should fall."""
GENERATED = ("docs/api/", "docs/studies/", "docs/alerts.md", "docs/command.md", "docs/troubleshooting.md")
HELD_TABLES = {
    "docs/access.md": "tests/server/test_matrix.py",
    "docs/architecture.md": "tests/paths.py",
    "docs/delivery.md": "tests/agent_delivery/test_documentation.py",
    "docs/numerics.md": "benchmarks/accumulation.py",
    "docs/metrics.md": "tests/docs/test_metrics.py",
    "docs/optimizers.md": "tests/agent/intent/matrix.py",
}
"""Pages whose tables are generated or compared with the code, and where; their other words are counted."""


def functions(path: Path, source: str) -> dict[str, int]:
    """Lines of every function of a module, by where it is."""
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source, str(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def single_importers() -> dict[str, list[str]]:
    """Modules that exactly one other module of the packages imports, by package."""
    sys.path[:0] = sorted(set(PACKAGES.values()))
    graph = grimp.build_graph(*PACKAGES)
    single = [name for name in sorted(graph.modules) if len(graph.find_modules_that_directly_import(name)) == 1]
    return {package: [name for name in single if name.partition(".")[0] == package] for package in PACKAGES}


def package_lines(modules: dict[str, int], single: dict[str, list[str]]) -> list[str]:
    """A line a package: modules, their median, and those with a single importer."""
    lines = []
    for package, folder in PACKAGES.items():
        prefix = str(Path(folder, package))
        sizes = [size for name, size in modules.items() if name.startswith(f"{prefix}/")]
        lines.append(
            f"{package}: {len(sizes)} modules, median {statistics.median(sizes):g} lines, "
            f"{len(single[package])} with a single importer"
        )
    return lines


def page_words() -> dict[str, int]:
    """Words of each page that people write, without the tables that the code holds."""
    pages = [page for pattern in ("*.md", "docs/**/*.md") for page in sorted(ROOT.glob(pattern))]
    texts = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    return {
        page: sum(word != "|" for line in text.splitlines() if _counts(page, line) for word in line.split())
        for page, text in texts.items()
        if not page.startswith(GENERATED)
    }


def _counts(page: str, line: str) -> bool:
    return not (page in HELD_TABLES and line.startswith("|"))


def used() -> dict[str, int]:
    """How much of each budget is used."""
    folders = {name: ROOT / folder / name for name, folder in PACKAGES.items()} | {"tests": ROOT / "tests"}
    lines = {
        name: sum(path.read_text().count("\n") for path in folder.rglob("*.py")) for name, folder in folders.items()
    }
    words = page_words()
    return lines | {
        "words of pages": sum(words.values()),
        "pages that people write": sum(page.startswith("docs/") for page in words),
    }


def against_budgets(counts: dict[str, int], budgets: dict[str, int]) -> tuple[list[str], list[str]]:
    """Says which counts are above their budgets, and which budgets should fall."""
    above = [name for name, most in budgets.items() if counts[name] > most]
    loose = [name for name, most in budgets.items() if counts[name] < (1 - SLACK) * most]
    return (
        [
            f"{name}: {counts[name]} is above its budget, {budgets[name]}: shorten, or say what it buys"
            for name in above
        ],
        [f"{name}: lower its budget from {budgets[name]} to {counts[name]}" for name in loose],
    )


def main(arguments: list[str]) -> int:
    """Measure the source folders under the working folder, and count the tests. `--list` names single importers."""
    sources = {path: path.read_text() for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))}
    modules = {str(path): source.count("\n") for path, source in sources.items() if source.strip()}
    lengths = {where: lines for path, source in sources.items() for where, lines in functions(path, source).items()}
    if not lengths:
        sys.exit("no functions found; run from the root of the repository")
    single = single_importers()
    if arguments == ["--list"]:
        print(*(name for names in single.values() for name in names), sep="\n")
    print(*package_lines(modules, single), sep="\n")
    singles = sum(map(len, single.values()))
    median = statistics.median(modules.values())
    share = sum(lines <= USUAL_FUNCTION for lines in lengths.values()) / len(lengths)
    breaches = [f"{name}: {lines} lines" for name, lines in modules.items() if lines > LONGEST_MODULE]
    breaches += [f"{where}: {lines} lines" for where, lines in lengths.items() if lines > LONGEST_FUNCTION]
    print(f"{len(modules)} modules, median {median:g} lines (below {MEDIAN_MODULE}), ", end="")
    print(f"longest {max(modules.values())}, with a single importer {singles} (below {SINGLE_IMPORTERS})")
    print(f"{len(lengths)} functions, {share:.1%} within {USUAL_FUNCTION} lines ({USUAL_SHARE:.0%}), ", end="")
    print(f"longest {max(lengths.values())}")
    above, loose = against_budgets(used(), BUDGETS)
    breaches += above
    for line in [*breaches, *loose]:
        print(line)
    slivers = singles >= SINGLE_IMPORTERS
    return int(bool(breaches) or median >= MEDIAN_MODULE or share < USUAL_SHARE or slivers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
