"""Reading a tree of components: every component, all text."""

from dash.development.base_component import Component


def components(tree):
    """Every component below `tree`, itself included."""
    if isinstance(tree, (list, tuple)):
        for child in tree:
            yield from components(child)
    elif isinstance(tree, Component):
        yield tree
        for name in ("children", "label"):
            yield from components(getattr(tree, name, None))


def text(tree):
    """All text below `tree`, joined by spaces."""
    if isinstance(tree, (list, tuple)):
        return " ".join(filter(None, map(text, tree)))
    if isinstance(tree, Component):
        return text(getattr(tree, "children", None))
    return "" if tree is None else str(tree)


def by_id(tree, identifier):
    """The component with this id."""
    return next(part for part in components(tree) if getattr(part, "id", None) == identifier)


def attributes(tree, name):
    """What the components below `tree` that have this attribute have there, in order."""
    return [found for part in components(tree) if (found := getattr(part, name, None)) is not None]


def figures(tree):
    """The ids of the run's figures below `tree`, which say kind and metric."""
    found = [identifier for identifier in attributes(tree, "id") if isinstance(identifier, dict)]
    return [identifier for identifier in found if identifier["type"] == "run-figure"]
