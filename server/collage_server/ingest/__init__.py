"""The way in: check, queue, one writer, acknowledge after the commit."""

from collage_server.ingest.check import check_batch
from collage_server.ingest.counters import IngestCounters
from collage_server.ingest.in_flight import Held, InFlight
from collage_server.ingest.registry import StreamRegistry
from collage_server.ingest.sealer import Sealer
from collage_server.ingest.writer import Writer

__all__ = ["Held", "InFlight", "IngestCounters", "Sealer", "StreamRegistry", "Writer", "check_batch"]
