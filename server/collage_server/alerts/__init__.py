"""The server's own evaluation of the alert catalogue, and the messages about its incidents."""

from collage_server.alerts.evaluator import AlertEvaluator, AlertRounds
from collage_server.alerts.messenger import Messenger
from collage_server.alerts.targets import Target, targets_of

__all__ = ["AlertEvaluator", "AlertRounds", "Messenger", "Target", "targets_of"]
