"""What all loop tests share: the same as the agent's."""

from tests.agent.conftest import _errors_are_raised, _one_thread

__all__ = ["_errors_are_raised", "_one_thread"]
