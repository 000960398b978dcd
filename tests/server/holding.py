"""A body in flight that no request brought."""

from contextlib import contextmanager

__all__ = ["holding"]


@contextmanager
def holding(budget, size):
    """Hold `size` bytes of a whole body in a budget of bytes in flight, as the route of reports does."""
    budget.admit(size)
    with budget.receive(()) as lease:
        lease.resize(size)
        yield lease
