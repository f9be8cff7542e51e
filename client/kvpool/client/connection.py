"""One connection to one life of the store, and who relies on it: it is not closed under a copy."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from kvpool.client.effects import Await, Call, Channel, Effect, Exclusive, Post, Steps, Work
from kvpool.client.pacing import Backoff
from kvpool.client.regions import Regions, receive_regions
from kvpool.client.streaming import DataLink
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BusyError,
    DeadlineError,
    KvpoolError,
    ProtocolError,
    StaleError,
    UnreachableError,
)
from kvpool.transfer.copying import Bytes

log = logging.getLogger("kvpool")

M = TypeVar("M", bound=Message | None)

LocalRegions = Callable[[bytes], list[Bytes]]
"""The memory behind an attach token, for a store in this process."""


class Route(NamedTuple):
    """How bytes travel: `name` is in-process, shm or stream; `reason` says why."""

    name: str
    reason: str


class Connection:
    """What was learnt over one channel. Leases and namespace numbers are valid only on theirs.

    The daemon reuses what this connection holds once it is closed. A connection that is of no more
    use is therefore *retired*: it is closed when the last copy and the last borrowed view are gone.
    """

    def __init__(
        self,
        channel: Channel,
        welcome: wire.Welcome,
        data: DataLink | None,
        local_regions: LocalRegions | None,
        backoff: Backoff,
    ) -> None:
        """`backoff` learns when a deadline passes: later requests then fail at once for a while."""
        self.channel = channel
        self.welcome = welcome
        self.keys_max, self.frame_bytes_max = welcome.keys_max, welcome.frame_bytes_max
        self.data = data
        """Data connections, if the daemon offers them."""
        self._regions: Regions | None = None
        self._unmappable = ""  # why the memory cannot be mapped although it may be
        self._local_regions = local_regions
        self._backoff = backoff
        self._changed = threading.Condition()
        self._copies = 0
        self._borrows = 0
        self._retired = False
        _connections.add(self)

    @property
    def alive(self) -> bool:
        """Whether leases that were granted here still hold, and bytes can be had for them."""
        lost = self.data is not None and self.data.lost
        return not self._retired and not lost and self.channel.alive

    @property
    def mapped(self) -> bool:
        """The memory may and can be mapped; else bytes are streamed."""
        return self.welcome.mapped and not self._unmappable

    @property
    def route(self) -> Route:
        """The way that bytes take on this connection, and why."""
        if self._local_regions is not None:
            return Route("in-process", "the store is in this process")
        if self.mapped:
            return Route("shm", f"the memory of domain {self.welcome.domain!r} may be mapped")
        why = self._unmappable or (
            f"tenant {self.welcome.tenant!r} may not map the memory of domain "
            f"{self.welcome.domain!r} over this connection"
        )
        return Route("stream", why)

    def ask(self, body: Message | None, kind: type[M]) -> Steps[M]:
        """One request and its response of type `kind`.

        Raises what the daemon reports, `UnreachableError` and `ProtocolError`.
        """
        return self._answer(Call(self.channel, body), kind)

    def post(self, body: Message) -> Steps[int]:
        """One request, whose response is to be had for a ticket: see `Channel.post`."""
        try:
            ticket: int = yield Post(self.channel, body)
        except KvpoolError as error:
            self._failed(error)
            raise
        return ticket

    def answer(self, ticket: int, kind: type[M]) -> Steps[M]:
        """The response to what was posted, as from `ask`."""
        try:
            return (yield from self._answer(Await(self.channel, ticket), kind))
        except BaseException:
            self.channel.drop(ticket)
            raise

    def _answer(self, effect: Effect, kind: type[M]) -> Steps[M]:
        try:
            answer = yield effect
            if not isinstance(answer, kind):
                raise ProtocolError(f"the daemon answered with {type(answer).__name__}")
        except KvpoolError as error:
            self._failed(error)
            raise
        self._backoff.succeeded()
        return answer

    def _failed(self, error: KvpoolError) -> None:
        if isinstance(error, DeadlineError):
            self._backoff.failed(error)
        if isinstance(error, ProtocolError) or not self.channel.alive:
            self.retire()

    def notify(self, body: Message, *, vital: bool = True) -> bool:
        """One-way, see `Channel.notify`: a dead connection has given everything back already."""
        return not self._retired and self.channel.notify(body, vital=vital)

    # ---- bytes

    def bulk(self, function: Callable[[float], Any], nbytes: int) -> Steps[Any]:
        """`function(end)` as a copy that the connection outlives.

        Raises `StaleError` if it is closed already: the extents may be somebody else's by now.
        """
        with self._copying():
            return (yield Work(function, nbytes))

    def stream(self) -> DataLink:
        """Raises `UnreachableError` if the daemon streams no bytes just now."""
        if self.data is None:
            self.retire()  # the next Welcome may know of a data worker
            raise UnreachableError("the daemon has no data worker for us just now")
        return self.data

    def regions(self, address: int, *, writable: bool) -> Steps[Regions]:
        """Regions that cover `address`, mapped if they are not yet. Raises `DeniedError`."""
        if not _suffices(self._regions, address, writable):
            yield Exclusive(partial(self._attach, address, writable))
        if self._regions is None:
            raise StaleError("the memory is not mapped")
        return self._regions

    def _attach(self, address: int, writable: bool) -> Steps[None]:
        if _suffices(self._regions, address, writable):  # somebody else was faster
            return
        # Once writable, always: a pool that grows is mapped anew as a whole.
        writable = writable or (self._regions is not None and self._regions.writable)
        attached = yield from self.ask(wire.Attach(writable=writable), wire.Attached)
        if self._local_regions is not None:
            arrays = self._local_regions(attached.token)
            self._regions = Regions(attached.region_bytes, arrays, writable=True)
            return
        receive = partial(receive_regions, self.welcome.attach_address, attached, writable)
        try:
            self._regions = yield Work(receive, 0)
        except KvpoolError as error:
            self._give_up_mapping(error)
            raise

    def _give_up_mapping(self, error: KvpoolError) -> None:
        """From now on bytes are streamed, if the daemon lives and offers that: descriptors may not
        pass between containers, for instance."""
        late = isinstance(error, DeadlineError)
        if self.channel.alive and self.data is not None and not late and self._regions is None:
            self._unmappable = f"the memory cannot be mapped: {error}"
            log.warning("bytes are streamed, because %s", self._unmappable)

    # ---- the end

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with self._changed:
            if not self.alive:
                raise StaleError("the connection was lost; match again")
            self._copies += 1
        try:
            yield
        finally:
            with self._changed:
                self._copies -= 1
                self._changed.notify_all()
            self._close_if_unused()

    def borrow(self) -> None:
        """Somebody has views of the memory until `give_back`. Raises `StaleError`."""
        with self._changed:
            if not self.alive:
                raise StaleError("the connection was lost; match again")
            self._borrows += 1

    def give_back(self) -> None:
        with self._changed:
            self._borrows -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Closes it as soon as nobody copies or borrows. Idempotent."""
        self._retired = True
        self._close_if_unused()

    def close(self, end: float) -> None:
        """Waits for the copies to end and closes it. Raises `BusyError` if they last too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copies, end - time.monotonic()):
                raise BusyError(f"{self._copies} copies are still running; close when they end")
            self._retired = True
        self._close()

    @property
    def copies(self) -> int:
        """Copies that are running."""
        return self._copies

    def _close_if_unused(self) -> None:
        with self._changed:
            if not self._retired or self._copies or self._borrows:
                return
        self._close()

    def _close(self) -> None:
        self.channel.close()
        if self.data is not None:
            self.data.close()

    def after_fork(self) -> None:
        """In the child, which has neither the maps nor the connection."""
        self._changed = threading.Condition()
        self._copies = self._borrows = 0
        self._retired = True
        self.data = None
        self.channel.forget()


def _suffices(regions: Regions | None, address: int, writable: bool) -> bool:
    return regions is not None and regions.covers(address) and (regions.writable or not writable)


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
