"""Transfers within one host: one copy through shared memory, or none.

The owner makes regions (`SharedMemory`), hands their descriptors to peers (`send_descriptors`), and
takes no part in any transfer. Peers map them (`MappedRegion`) and copy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence

from kvpool.proto.errors import InvalidError, KvpoolError, StaleError, UnreachableError
from kvpool.transfer.base import (
    Buffer,
    Capabilities,
    Cost,
    EndpointState,
    Item,
    Locality,
    MemoryKind,
    Region,
    Status,
    Transfer,
    check_batch,
    check_item,
    decode_descriptor,
    encode_descriptor,
)
from kvpool.transfer.copying import Bytes, as_bytes, move
from kvpool.transfer.descriptors import (
    PassedRegion,
    map_regions,
    receive_descriptors,
    send_descriptors,
)
from kvpool.transfer.memory import MappedRegion, SharedMemory, SharedRegion
from kvpool.transfer.meter import Meter
from kvpool.transfer.sockets import close_listener, connect, listen
from kvpool.transfer.transfers import Finished

__all__ = [
    "MappedRegion",
    "PassedRegion",
    "SharedMemory",
    "SharedRegion",
    "ShmEndpoint",
    "ShmTransport",
    "map_regions",
    "receive_descriptors",
    "send_descriptors",
]

MAX_BATCH = 1 << 16
ATTACH_DEADLINE_S = 5.0
"""Seconds for a peer to get its descriptors."""

_CAPABILITIES = Capabilities(
    kinds=frozenset({MemoryKind.DRAM}),
    localities=frozenset({Locality.SAME_PROCESS, Locality.SAME_HOST}),
    one_sided=True,
    writes=True,
    detects_peer_death=False,
    spins=False,
    alignment=1,
    max_batch=MAX_BATCH,
)


class ShmEndpoint:
    """Maps of one peer's regions. Transfers happen within the call, on the caller's thread.

    The owner cannot stop a transfer: who hands out items must keep them in place until the reader
    says that it is done with them.
    """

    def __init__(self, regions: Iterable[MappedRegion]) -> None:
        """Takes over `regions`."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._moving = 0
        self._regions: dict[int, MappedRegion] | None = {}
        self._meter = Meter(latency_s=2e-6, bytes_per_s=10e9, cpu_s_per_byte=1e-10)
        self.add(regions)

    def add(self, regions: Iterable[MappedRegion]) -> None:
        """Take over more regions, e.g. those that the owner made since; a newer generation of an
        id replaces the older. Raises `UnreachableError` if closed."""
        known = self._open()
        for region in regions:
            replaced = known.get(region.region.id)
            known[region.region.id] = region
            if replaced is not None:
                replaced.close()

    def borrow(self, item: Item) -> Bytes:
        """A read-only view of `item`, without a copy, for as long as its holder keeps it in place.

        Raises `StaleError` for an unknown region, another generation and in fork children, and
        `InvalidError` out of range.
        """
        mapped = self._open().get(item.region)
        if mapped is None or mapped.region.generation != item.generation:
            raise StaleError(f"region {item.region} generation {item.generation} is not mapped")
        view = mapped.view(item.offset, item.nbytes)
        view.flags.writeable = False
        return view

    def read(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._move(items, buffers, deadline, write=False)

    def write(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._move(items, buffers, deadline, write=True)

    def estimate(self, nbytes: int) -> Cost:
        return self._meter.estimate(nbytes)

    @property
    def state(self) -> EndpointState:
        return EndpointState.CLOSED if self._regions is None else EndpointState.OPEN

    def close(self) -> None:
        """Ends transfers of other threads between two items and waits for them.

        Borrowed views stay valid; the maps go with the last of them.
        """
        if os.getpid() != self._pid:
            return
        regions, self._regions = self._regions or {}, None
        for region in regions.values():
            region.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._moving)

    def _open(self) -> dict[int, MappedRegion]:
        # First of all: in a fork child the condition may be held for ever.
        if os.getpid() != self._pid:
            raise StaleError("the endpoint was opened before fork(); connect again in this process")
        if self._regions is None:
            raise UnreachableError("the endpoint is closed")
        return self._regions

    def _move(
        self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float, write: bool
    ) -> Transfer:
        regions = self._open()
        check_batch(items, buffers, MAX_BATCH)
        views = [as_bytes(buffer, writable=not write) for buffer in buffers]
        started = time.monotonic()
        with self._changed:
            self._moving += 1
        try:
            statuses = [
                self._move_one(regions, item, view, started + deadline, write)
                for item, view in zip(items, views, strict=True)
            ]
        finally:
            with self._changed:
                self._moving -= 1
                self._changed.notify_all()
        if Status.OK in statuses:
            self._meter.observe(sum(view.size for view in views), time.monotonic() - started)
        return Finished(statuses)

    def _move_one(
        self, regions: dict[int, MappedRegion], item: Item, local: Bytes, end: float, write: bool
    ) -> Status:
        if self._regions is None:
            return Status.CANCELLED
        if time.monotonic() >= end:
            return Status.DEADLINE
        mapped = regions.get(item.region)
        status = check_item(item, mapped.region if mapped else None, local.size)
        if status is not Status.OK or mapped is None:
            return status
        if write and not mapped.writable:
            return Status.DENIED
        try:
            remote = mapped.view(item.offset, item.nbytes)
        except StaleError:
            return Status.CANCELLED
        move(*((remote, local) if write else (local, remote)))
        return Status.OK


class ShmTransport:
    """Owner side: serves the descriptors of a `SharedMemory` on a Unix socket. Peer side: attaches.

    A daemon with its own attach protocol uses `send_descriptors` and `ShmEndpoint` directly.
    """

    name = "shm"

    def __init__(
        self,
        memory: SharedMemory | None = None,
        address: str | None = None,
        writable: bool = False,
    ) -> None:
        """An owner gives `memory` (which stays its own to close) and an `address` unix:PATH, where
        peers get maps that are read-only unless `writable`. Raises as `sockets.listen`."""
        self._pid = os.getpid()
        self._memory = memory
        self._address = address
        self._writable = writable
        self._endpoints: list[ShmEndpoint] = []
        self._listener: socket.socket | None = None
        if memory is not None and address is not None:
            self._listener = listen(address)
            self._server = threading.Thread(
                target=self._serve, args=(memory, self._listener), name="kvpool-shm", daemon=True
            )
            self._server.start()

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def register(self, buffer: Buffer) -> Region:
        """The region whose `SharedRegion.array` is `buffer`; no other memory can be shared."""
        view = as_bytes(buffer)
        for shared in self._memory.regions if self._memory else ():
            if view.ctypes.data == shared.array.ctypes.data and view.size == shared.region.nbytes:
                return shared.region
        raise InvalidError("shm serves only whole arrays of SharedMemory.create_region")

    def deregister(self, region: Region) -> None:
        if self._memory is None:
            raise InvalidError(f"{region} does not exist")
        self._memory.drop_region(region)

    def descriptor(self) -> bytes:
        if self._address is None:
            raise InvalidError("this shm transport serves nothing: give it memory and an address")
        return encode_descriptor(self.name, address=self._address)

    def connect(self, descriptor: bytes) -> ShmEndpoint:
        (address,) = decode_descriptor(descriptor, self.name, "address")
        with connect(address, ATTACH_DEADLINE_S) as sock:
            endpoint = ShmEndpoint(map_regions(receive_descriptors(sock, ATTACH_DEADLINE_S)))
        self._endpoints = [e for e in self._endpoints if e.state is not EndpointState.CLOSED]
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork child has nothing of it, and must not end what its parent serves
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            # On Linux this ends the `accept` of the serving thread.
            listener.shutdown(socket.SHUT_RDWR)
            self._server.join()
            close_listener(listener)

    def _serve(self, memory: SharedMemory, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            # A peer that failed says so itself; the next one is served.
            with peer, contextlib.suppress(KvpoolError):
                send_descriptors(peer, memory.regions, self._writable, ATTACH_DEADLINE_S)
