"""The contract holds what two components share: a module of it that only one uses belongs to that one.

The command `collage-monitor` counts as a component, with `command/` and `importing/` as its modules. So
is what another program loads by an entry point: it may cost that program nothing.
"""

import sys
from collections.abc import Iterator

import grimp

CONTRACT = "collage_monitor"
COMPONENTS = {
    "agent": "agent",
    "server": "server",
    "dashboard": "dashboard",
    "demo": "studies",
    "studies": "studies",
}
"""A component, and the folder that it is imported from."""
COMMAND = ("collage_monitor.command", "collage_monitor.importing", "collage_monitor.verl_plugin")


def users(graph: grimp.ImportGraph, module: str) -> set[str]:
    """The components that import a module of the contract, by themselves or through another of its modules."""
    found = set()
    for user in graph.find_downstream_modules(module):
        package = user.partition(".")[0]
        if package != CONTRACT:
            found.add(package)
        elif user.startswith(COMMAND):
            found.add("the command")
    return found


def breaches(graph: grimp.ImportGraph) -> Iterator[str]:
    """A line for each module of the contract with fewer than two users."""
    for module in sorted(graph.modules):
        if module.startswith(f"{CONTRACT}.") and not module.startswith(COMMAND):
            by = users(graph, module)
            if len(by) < 2:
                yield f"{module}: used by {', '.join(by) or 'nobody'} alone; move it there"


def main() -> int:
    """Print each breach; 1 if there is one. Run from the root of the repository."""
    sys.path[:0] = [".", *COMPONENTS.values()]
    packages = [f"collage_{component}" for component in COMPONENTS]
    found = list(breaches(grimp.build_graph(CONTRACT, *packages)))
    print(*(found or ["every module of the contract has two users"]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
