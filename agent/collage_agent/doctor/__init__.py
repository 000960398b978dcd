"""What the agent finds on a machine before a training starts, in plain words: one check a question."""

from collage_agent.doctor.checks import Check, Status
from collage_agent.doctor.delivery import delivery_checks
from collage_agent.doctor.machine import machine_checks

__all__ = ["Check", "Status", "delivery_checks", "machine_checks"]
