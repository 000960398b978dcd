"""How reports leave the process: a queue, a worker, and transports to a server or to memory."""

from collage_agent.transport.envelope import Envelope, Transport
from collage_agent.transport.http import HttpTransport
from collage_agent.transport.memory import MemoryTransport

__all__ = ["Envelope", "HttpTransport", "MemoryTransport", "Transport"]
