"""The client: sessions that match, pull and publish KV. See `examples/embed.py`."""

from kvpool.client.aio import AsyncClient, connect_async
from kvpool.client.aio_sessions import AsyncPublication, AsyncSession
from kvpool.client.api import Client, connect
from kvpool.client.borrowing import Borrow
from kvpool.client.connection import Route
from kvpool.client.local import LocalStore
from kvpool.client.matching import LEARNED
from kvpool.client.prefix import usable_prefix
from kvpool.client.results import Explanation, Match, Publish, Pull
from kvpool.client.sessions import Publication, Session
from kvpool.proto.keys import Extra
from kvpool.proto.layout import Part, Plane, native, portable
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome, Reason

__all__ = [
    "LEARNED",
    "AsyncClient",
    "AsyncPublication",
    "AsyncSession",
    "Borrow",
    "Client",
    "Explanation",
    "Extra",
    "LocalStore",
    "Match",
    "Namespace",
    "Outcome",
    "Part",
    "Plane",
    "Publication",
    "Publish",
    "Pull",
    "Reason",
    "Route",
    "Session",
    "connect",
    "connect_async",
    "native",
    "portable",
    "usable_prefix",
]
