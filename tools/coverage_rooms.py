"""What the tests run, by room: shares of statements and of branches, and the functions that they never enter.

Reads what `make coverage` measured; prints a table for CONTRIBUTING.md, then a line a function.
"""

import io
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from coverage import Coverage

_SUMS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def rooms(files: dict[str, Any]) -> dict[str, Counter[str]]:
    """Sums by package and its first folder, of what `coverage json` says of each file."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for name, file in files.items():
        parts = Path(name).parts
        place = next(index for index, part in enumerate(parts) if part.startswith("collage_"))
        for room in {parts[place], "/".join(parts[place : place + 2]) if len(parts) > place + 2 else parts[place]}:
            sums[room].update({key: file["summary"].get(key, 0) for key in _SUMS})
    return dict(sorted(sums.items()))


def never_entered(files: dict[str, Any]) -> list[str]:
    """Functions of which no statement ran."""
    return [
        f"{name}: {function}, {region['summary']['num_statements']} statements"
        for name, file in sorted(files.items())
        for function, region in file["functions"].items()
        if function and region["summary"]["num_statements"] and not region["summary"]["covered_lines"]
    ]


def main() -> None:
    measured = Coverage()
    measured.load()
    written = Path(measured.config.data_file).with_name("coverage.json")
    # Tests write modules of our names elsewhere, too, which are gone.
    measured.json_report(outfile=str(written), ignore_errors=True)
    files = {
        name: file
        for name, file in json.loads(written.read_text())["files"].items()
        if not Path(name).is_absolute()
    }
    table = io.StringIO()
    print("| room | statements | of them run | branches taken |\n| --- | ---: | ---: | ---: |", file=table)
    for room, sums in rooms(files).items():
        lines = sums["covered_lines"] / max(sums["num_statements"], 1)
        branches = sums["covered_branches"] / max(sums["num_branches"], 1)
        print(f"| {room} | {sums['num_statements']:,} | {lines:.1%} | {branches:.1%} |", file=table)
    sys.stdout.write(table.getvalue())
    print(*never_entered(files), sep="\n")


if __name__ == "__main__":
    main()
