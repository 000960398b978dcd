"""How reports leave the process: a queue, a worker, and transports to a server or to memory."""

from collage_agent.transport.envelope import Envelope, MemoryTransport, Transport
from collage_agent.transport.http import HttpTransport

__all__ = ["Envelope", "HttpTransport", "MemoryTransport", "Transport"]
