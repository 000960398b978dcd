"""The precision audit: how a run keeps its weights and states, as its checkpoint shows, and what that costs."""

from collage_agent.audit.adapter_merge import AdapterMerge, audit_merge
from collage_agent.audit.checkpoint_audit import Audit, audit_checkpoint, render
from collage_agent.audit.checkpoint_files import CheckpointError
from collage_agent.audit.findings import AuditFinding
from collage_agent.audit.split_layouts import read_checkpoint

__all__ = [
    "AdapterMerge",
    "Audit",
    "AuditFinding",
    "CheckpointError",
    "audit_checkpoint",
    "audit_merge",
    "read_checkpoint",
    "render",
]
