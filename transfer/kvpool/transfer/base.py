"""The contract of every transport: words, per-item statuses and the Protocols that backends keep.

A transport moves bytes between *regions* of one side and *local buffers* of the other. It is
one-sided: the owner registers memory once, peers then read and write it by batches of `Item`. It
knows no keys and stores nothing.

Rules for all backends
    * An item succeeds or fails alone. A failing item never taints the others of its batch.
    * Only `Status.OK` says that the bytes are right. The buffer of any other item is undefined.
    * Deadlines are durations in seconds, counted from the call.
    * Buffers belong to the transfer until it is `done()`: neither touch nor free them before.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvpool.proto.errors import InvalidError, ProtocolError

Buffer: TypeAlias = object
"""Anything whose bytes `kvpool.transfer.copying.as_bytes` can reach without copying."""


class MemoryKind(StrEnum):
    """Where a region's bytes live."""

    DRAM = "dram"
    GPU = "gpu"
    FILE = "file"


class Locality(IntEnum):
    """How far away the peer is. A smaller number is nearer."""

    SAME_PROCESS = 0
    SAME_HOST = 1
    REMOTE = 2


class Status(IntEnum):
    """What became of one item. The numbers travel between peers: never renumber."""

    OK = 0
    """All bytes moved; they are right as far as this transport can tell."""
    UNKNOWN_REGION = 1
    """The owner has no such region (any more)."""
    STALE = 2
    """The region was registered anew: the generation differs."""
    OUT_OF_RANGE = 3
    """Offset and length leave the region."""
    LENGTH = 4
    """The local buffer is not as long as the item."""
    DENIED = 5
    """This side may not write there."""
    UNREACHABLE = 6
    """The peer vanished before the item's verdict arrived."""
    DEADLINE = 7
    """The item was not finished in time."""
    CANCELLED = 8
    """`Transfer.cancel` came first."""
    SHORT = 9
    """Fewer bytes arrived than were asked for."""
    FAILED = 10
    """The device or system call failed."""
    REJECTED = 11
    """The owner withdrew the bytes after sending them (its validator said no)."""


class EndpointState(StrEnum):
    """Whether an endpoint is worth another call."""

    OPEN = "open"
    BROKEN = "broken"
    """The last call failed; the next one tries to connect again."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that peers can reach. They name it by (id, generation), never by an address."""

    id: int
    generation: int
    """Grows each time the id is given to other memory, so that old items are refused."""
    nbytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int | None = None
    """Index of the GPU, or None for host memory and files."""


class Item(NamedTuple):
    """A piece of a remote region, `offset` and `nbytes` in bytes."""

    region: int
    generation: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do; `Selector` intersects them with what is needed."""

    kinds: frozenset[MemoryKind]
    localities: frozenset[Locality]
    one_sided: bool
    """The owner's CPU takes no part in a transfer."""
    writes: bool
    """Peers can be given the right to write."""
    detects_peer_death: bool
    """A dead peer is noticed by itself, before a deadline."""
    spins: bool
    """Waiting burns CPU."""
    alignment: int
    """Offsets and addresses must be multiples of this many bytes; 1 = any."""
    max_batch: int
    """Most items in one call."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a transfer is expected to cost."""

    seconds: float
    cpu_seconds: float
    """CPU time of both sides together."""
    basis: str
    """`"assumed"` before anything was measured, then `"measured"`."""


class Transfer(Protocol):
    """A batch on its way. Awaiting it yields the statuses and never raises for a failed item."""

    def done(self) -> bool:
        """Whether each item has its final status and nothing can land any more."""

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; returns `done()`."""

    @property
    def statuses(self) -> Sequence[Status]:
        """One per item, in order. REQUIRES: `done()` (else `InvalidError`)."""

    def cancel(self) -> None:
        """Give up. Returns only when nothing can land in the buffers any more.

        Items that were finished before keep their status.
        """

    def __await__(self) -> Generator[Any, None, Sequence[Status]]: ...


class Endpoint(Protocol):
    """A connection to one peer's regions. Thread-safe."""

    def read(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        """Fill each buffer from its item.

        Raises `InvalidError` if the batch itself is wrong (lists of different length, a buffer that
        cannot be written or is not contiguous, too many items), before any byte moves, and
        `UnreachableError` on a closed endpoint. Everything else is a status.
        """

    def write(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        """Copy each buffer to its item; as `read`. A write that failed may have landed in part."""

    def estimate(self, nbytes: int) -> Cost:
        """The cost of reading `nbytes` bytes as one item."""

    @property
    def state(self) -> EndpointState: ...

    def close(self) -> None:
        """Cancels what is in flight and returns when nothing can land. Idempotent."""


class Transport(Protocol):
    """One way to move bytes, on either side: owners register, peers connect. Thread-safe."""

    @property
    def name(self) -> str:
        """The name by which configuration chooses it."""

    def capabilities(self) -> Capabilities: ...

    def register(self, buffer: Buffer) -> Region:
        """Let peers reach `buffer`, which stays alive and in place until `deregister`.

        Raises `InvalidError` for memory that this transport cannot serve.
        """

    def deregister(self, region: Region) -> None:
        """Withdraw it. Returns when no peer can touch the memory through this transport any more,
        except through maps that a same-host peer already holds. Raises `InvalidError` if unknown.
        """

    def descriptor(self) -> bytes:
        """What a peer needs to `connect`; opaque, to be handed over a trusted channel."""

    def connect(self, descriptor: bytes) -> Endpoint:
        """Raises `ProtocolError` for a foreign descriptor, `UnreachableError` for a dead peer."""

    def close(self) -> None:
        """Withdraws all regions and closes all endpoints. Idempotent."""


def check_item(item: Item, region: Region | None, local_nbytes: int) -> Status:
    """The verdict on `item` before any byte moves, `region` being the owner's with that id."""
    if item.nbytes != local_nbytes:
        return Status.LENGTH
    if region is None:
        return Status.UNKNOWN_REGION
    if item.generation != region.generation:
        return Status.STALE
    if item.offset < 0 or item.nbytes < 0 or item.offset + item.nbytes > region.nbytes:
        return Status.OUT_OF_RANGE
    return Status.OK


def check_batch(items: Sequence[Item], buffers: Sequence[Buffer], max_batch: int) -> None:
    """Raises `InvalidError` if the lists cannot form a batch."""
    if len(items) != len(buffers):
        raise InvalidError(f"{len(items)} items but {len(buffers)} buffers")
    if len(items) > max_batch:
        raise InvalidError(f"{len(items)} items in one batch; at most {max_batch} are accepted")


def encode_descriptor(transport: str, **fields: str) -> bytes:
    """The document that `Transport.descriptor` returns."""
    return json.dumps({"transport": transport, **fields}).encode()


def decode_descriptor(descriptor: bytes, transport: str, *names: str) -> list[str]:
    """The fields `names` of a descriptor. Raises `ProtocolError` if it is not `transport`'s."""
    try:
        fields = json.loads(descriptor)
    except ValueError as error:
        raise ProtocolError("not a transport descriptor") from error
    if not isinstance(fields, dict) or fields.get("transport") != transport:
        raise ProtocolError(f"not a descriptor of transport {transport!r}")
    values = [fields.get(name) for name in names]
    if not all(isinstance(value, str) for value in values):
        raise ProtocolError(f"a descriptor of transport {transport!r} has the fields {names}")
    return [str(value) for value in values]
