"""What arrived at a MemoryTransport: measured steps, scalars, and what the run was told."""

from collage_monitor.wire import RunCreate

__all__ = ["begun", "scalars_of", "steps_of"]


def steps_of(transport):
    """The measured steps, in order."""
    return [report.step for report in transport.reports if report.statistics is not None]


def scalars_of(transport):
    """Name to (step, value) of everything logged."""
    found: dict[str, list[tuple[int, float]]] = {}
    for report in transport.reports:
        for name, value in report.scalars.items():
            found.setdefault(name, []).append((report.step, value))
    return found


def begun(transport):
    """The message that began the run."""
    return next(message for message in transport.messages if isinstance(message, RunCreate))
