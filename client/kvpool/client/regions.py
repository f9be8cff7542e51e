"""The daemon's memory as this process sees it: addresses of extents become views."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.proto import session as protocol
from kvpool.proto.errors import ProtocolError, StaleError
from kvpool.transfer.copying import Bytes
from kvpool.transfer.descriptors import map_regions, receive_descriptors
from kvpool.transfer.sockets import connect
from kvpool.transfer.stream import Stream


class Regions:
    """Views over the regions of one daemon life, each `region_bytes` long."""

    __slots__ = ("_arrays", "region_bytes", "writable")

    def __init__(self, region_bytes: int, arrays: Sequence[Bytes], writable: bool) -> None:
        self.region_bytes = region_bytes
        self.writable = writable
        self._arrays = list(arrays)

    def covers(self, address: int) -> bool:
        """False if the pool has grown since it was mapped."""
        return address // self.region_bytes < len(self._arrays)

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes of an extent. Raises `StaleError` for an address that is not mapped."""
        region, offset = divmod(address, self.region_bytes)
        if region >= len(self._arrays):
            raise StaleError(f"region {region} is not mapped; match again")
        return self._arrays[region][offset : offset + nbytes]


def receive_regions(
    address: str, token: bytes, region_bytes: int, writable: bool, deadline: float
) -> Regions:
    """Redeems an attach token at the daemon's descriptor socket and maps what it hands over.

    Raises `DeniedError`, `UnreachableError`, `DeadlineError` or `ProtocolError`.
    """
    end = time.monotonic() + deadline
    # Exact reads: what a stream would read ahead loses its descriptors.
    with Stream(connect(address, deadline), exact=True) as stream:
        stream.send(token, deadline=deadline)
        answer = stream.receive(deadline=deadline)
        if answer != b"ok":
            _raise_refusal(answer)
        passed = receive_descriptors(stream.sock, max(end - time.monotonic(), 0.001))
    maps = map_regions(sorted(passed, key=lambda one: one.region.id))
    return Regions(region_bytes, [one.view() for one in maps], writable)


def _raise_refusal(answer: bytes) -> None:
    protocol.parse_response(answer)  # an Error about the connection is raised in there
    raise ProtocolError("the descriptor socket answered with something else")
