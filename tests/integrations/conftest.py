"""As in `tests.launching`, errors that the agent would swallow in training are raised."""

from tests.launching.conftest import _errors_are_raised

__all__ = ["_errors_are_raised"]
