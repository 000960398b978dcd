"""The size check: modules and functions stay small enough to read. Prints both figures, ends with 1 on a breach."""

import ast
import statistics
import sys
from pathlib import Path

FOLDERS = ("collage_monitor", "agent", "server", "dashboard", "studies", "benchmarks", "tools")
MEDIAN_MODULE, LONGEST_MODULE = 200, 500
USUAL_FUNCTION, LONGEST_FUNCTION, USUAL_SHARE = 40, 100, 0.95


def functions(path: Path, source: str) -> dict[str, int]:
    """Lines of every function of a module, by where it is."""
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source, str(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def main() -> int:
    """Measure the source folders under the working folder; tests are left out."""
    sources = {path: path.read_text() for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))}
    modules = {str(path): source.count("\n") for path, source in sources.items() if source.strip()}
    lengths = {where: lines for path, source in sources.items() for where, lines in functions(path, source).items()}
    if not lengths:
        sys.exit("no functions found; run from the root of the repository")
    median = statistics.median(modules.values())
    share = sum(lines <= USUAL_FUNCTION for lines in lengths.values()) / len(lengths)
    breaches = [f"{name}: {lines} lines" for name, lines in modules.items() if lines > LONGEST_MODULE]
    breaches += [f"{where}: {lines} lines" for where, lines in lengths.items() if lines > LONGEST_FUNCTION]
    print(
        f"{len(modules)} modules, median {median:g} lines (below {MEDIAN_MODULE}), longest {max(modules.values())}"
    )
    print(f"{len(lengths)} functions, {share:.1%} within {USUAL_FUNCTION} lines ({USUAL_SHARE:.0%}), ", end="")
    print(f"longest {max(lengths.values())}")
    print(*breaches, sep="\n", end="\n" if breaches else "")
    return int(bool(breaches) or median >= MEDIAN_MODULE or share < USUAL_SHARE)


if __name__ == "__main__":
    sys.exit(main())
