"""Files from elsewhere as a run: JSON lines of an export, loss curves from CSV or TensorBoard."""

from collage_monitor.importing.curve_files import read_curves, read_events
from collage_monitor.importing.imported_run import ImportRefusal, Source, new_run_id, send_source
from collage_monitor.importing.json_lines import read_lines

__all__ = ["ImportRefusal", "Source", "new_run_id", "read_curves", "read_events", "read_lines", "send_source"]
