"""The daemon's memory as this process sees it: addresses of extents become views."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.client.pacing import left
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
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
        view = self.array(region)[offset : offset + nbytes]
        if view.size < nbytes:
            raise StaleError(f"{nbytes} bytes at {address:#x} leave their region; match again")
        return view

    def array(self, region: int) -> Bytes:
        """All bytes of one region. Raises `StaleError` if it is not mapped."""
        if not 0 <= region < len(self._arrays):
            raise StaleError(f"region {region} is not mapped; match again")
        return self._arrays[region]


def receive_regions(address: str, attached: wire.Attached, writable: bool, end: float) -> Regions:
    """Redeems an attach token at the daemon's descriptor socket and maps what it hands over.

    Raises `DeniedError`, `UnreachableError`, `DeadlineError` or `ProtocolError`.
    """
    # Exact reads: what a stream would read ahead loses its descriptors.
    with Stream(connect(address, left(end)), exact=True) as stream:
        stream.send(attached.token, deadline=left(end))
        answer = stream.receive(deadline=left(end))
        if answer != b"ok":
            _raise_refusal(answer)
        passed = receive_descriptors(stream.sock, left(end))
    maps = map_regions(sorted(passed, key=lambda one: one.region.id))
    if not maps or not attached.region_bytes:
        raise ProtocolError("the daemon handed over no memory")
    return Regions(attached.region_bytes, [one.view() for one in maps], writable)


def _raise_refusal(answer: bytes) -> None:
    protocol.parse_response(answer)  # an Error about the connection is raised in there
    raise ProtocolError("the descriptor socket answered with something else")
