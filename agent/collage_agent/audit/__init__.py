"""The precision audit: how a run keeps its weights and states, as its checkpoint shows, and what that costs."""

from collage_agent.audit.findings import AuditFinding
from collage_agent.audit.reading import CheckpointError, read_checkpoint
from collage_agent.audit.report import Audit, audit_checkpoint, render

__all__ = ["Audit", "AuditFinding", "CheckpointError", "audit_checkpoint", "read_checkpoint", "render"]
