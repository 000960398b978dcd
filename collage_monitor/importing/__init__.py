"""Files from elsewhere as a run: JSON lines of an export, loss curves from CSV or TensorBoard."""

from collage_monitor.importing.curves import read_curves, read_events
from collage_monitor.importing.lines import read_lines
from collage_monitor.importing.source import ImportRefusal, Source, new_run_id, send_source

__all__ = ["ImportRefusal", "Source", "new_run_id", "read_curves", "read_events", "read_lines", "send_source"]
