"""Transfers within one process, with faults on demand: the fake beside the real backends.

Each fault that a network or a device shows is drawn from a seed, so that a failure is a number.
Nothing runs by itself: a late item lands when somebody asks `done`, `wait` or awaits after its
time has come by the injected clock. A simulation therefore decides when everything happens.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.proto.errors import InvalidError, UnreachableError
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
    decode_descriptor,
    encode_descriptor,
)
from kvpool.transfer.copying import Bytes, as_bytes, move
from kvpool.transfer.meter import Meter
from kvpool.transfer.regions import RegionTable
from kvpool.transfer.transfers import Finished

MAX_BATCH = 1 << 16

_CAPABILITIES = Capabilities(
    kinds=frozenset({MemoryKind.DRAM}),
    localities=frozenset({Locality.SAME_PROCESS}),
    one_sided=True,
    writes=True,
    detects_peer_death=True,
    spins=False,
    alignment=1,
    max_batch=MAX_BATCH,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per item, 0 to 1, drawn independently of each other from `seed`."""

    seed: int = 0
    fail: float = 0.0
    """Nothing moves; `Status.FAILED`."""
    short: float = 0.0
    """Only a first part moves; `Status.SHORT`."""
    corrupt: float = 0.0
    """One bit is flipped and the status is OK: only a checksum above can see it."""
    delay: float = 0.0
    """The item lands `delay_s` later."""
    delay_s: float = 0.01


@dataclass(frozen=True, slots=True)
class _Fate:
    """What the faults have in store for one item. Fractions choose the place."""

    fails: bool
    short_at: float | None
    flip_at: float | None
    delay_s: float


class _Dice:
    """Draws fates in the order of the items. Thread-safe."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()

    def roll(self, count: int) -> list[_Fate]:
        with self._lock:
            return [self._one() for _ in range(count)]

    def _one(self) -> _Fate:
        # Always as many draws, so that one kind of fault does not change where the others fall.
        fail, short, corrupt, delay, short_at, flip_at = (self._random.random() for _ in range(6))
        faults = self._faults
        return _Fate(
            fails=fail < faults.fail,
            short_at=short_at if short < faults.short else None,
            flip_at=flip_at if corrupt < faults.corrupt else None,
            delay_s=faults.delay_s if delay < faults.delay else 0.0,
        )


class InprocTransport:
    """Owner and peers are objects of one process."""

    name = "inproc"

    def __init__(
        self,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """The owner's `faults` strike its peers. `sleep` must let `clock` advance."""
        self.regions = RegionTable()
        self.dice = _Dice(faults or Faults())
        self.closed = False
        self._clock = clock
        self._sleep = sleep
        self._address = f"{os.getpid()}-{next(_numbers)}"
        self._endpoints: list[InprocEndpoint] = []
        _transports[self._address] = self

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def register(self, buffer: Buffer) -> Region:
        return self.regions.register(buffer)

    def deregister(self, region: Region) -> None:
        self.regions.deregister(region)

    def descriptor(self) -> bytes:
        return encode_descriptor(self.name, address=self._address)

    def connect(self, descriptor: bytes) -> InprocEndpoint:
        (address,) = decode_descriptor(descriptor, self.name, "address")
        owner = _transports.get(address)
        if owner is None or owner.closed:
            raise UnreachableError(f"no open inproc transport {address} in this process")
        endpoint = InprocEndpoint(owner, self._clock, self._sleep)
        self._endpoints = [e for e in self._endpoints if e.state is not EndpointState.CLOSED]
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        self.closed = True
        _transports.pop(self._address, None)
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()


_transports: weakref.WeakValueDictionary[str, InprocTransport] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class InprocEndpoint:
    """Reads and writes the regions of one `InprocTransport`."""

    def __init__(
        self, owner: InprocTransport, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._sleep = sleep
        self._closed = False
        self._meter = Meter(latency_s=1e-6, bytes_per_s=10e9, cpu_s_per_byte=1e-10)
        self._late: weakref.WeakSet[_Late] = weakref.WeakSet()

    def read(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._move(items, buffers, deadline, write=False)

    def write(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._move(items, buffers, deadline, write=True)

    def estimate(self, nbytes: int) -> Cost:
        return self._meter.estimate(nbytes)

    @property
    def state(self) -> EndpointState:
        if self._closed:
            return EndpointState.CLOSED
        return EndpointState.BROKEN if self._owner.closed else EndpointState.OPEN

    def close(self) -> None:
        self._closed = True
        for transfer in list(self._late):
            transfer.cancel()

    def _move(
        self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float, write: bool
    ) -> Transfer:
        if self._closed:
            raise UnreachableError("the endpoint is closed")
        check_batch(items, buffers, MAX_BATCH)
        views = [as_bytes(buffer, writable=not write) for buffer in buffers]
        started = self._clock()
        moves = [
            _Move(self._owner, item, view, write, fate, started + fate.delay_s)
            for item, view, fate in zip(
                items, views, self._owner.dice.roll(len(items)), strict=True
            )
        ]
        late = _Late(moves, started + deadline, self._clock, self._sleep)
        if not late.done():
            self._late.add(late)
            return late
        self._meter.observe(sum(view.size for view in views), self._clock() - started)
        return Finished(late.statuses)


@dataclass(frozen=True, slots=True)
class _Move:
    """One item that lands at `due`."""

    owner: InprocTransport
    item: Item
    local: Bytes
    write: bool
    fate: _Fate
    due: float

    def land(self) -> Status:
        if self.owner.closed:
            return Status.UNREACHABLE
        with self.owner.regions.using(self.item, self.local.size, self.write) as (status, remote):
            if status is not Status.OK:
                return status
            if self.fate.fails:
                return Status.FAILED
            source, target = (self.local, remote) if self.write else (remote, self.local)
            return _copy_with_faults(target, source, self.fate)


def _copy_with_faults(target: Bytes, source: Bytes, fate: _Fate) -> Status:
    if fate.short_at is not None and source.size:
        nbytes = int(source.size * fate.short_at)
        move(target[:nbytes], source[:nbytes])
        return Status.SHORT
    move(target, source)
    if fate.flip_at is not None and source.size:
        byte, bit = divmod(int(source.size * 8 * fate.flip_at), 8)
        target[byte] ^= 1 << bit
    return Status.OK


class _Late:
    """A transfer that makes progress when it is looked at."""

    def __init__(
        self,
        moves: Sequence[_Move],
        end: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._lock = threading.Lock()
        self._pending = dict(enumerate(moves))
        self._statuses = [Status.CANCELLED] * len(moves)
        self._end = end
        self._clock = clock
        self._sleep = sleep

    def done(self) -> bool:
        with self._lock:
            now = self._clock()
            for index, move in list(self._pending.items()):
                if move.due <= now and move.due < self._end:
                    self._statuses[index] = move.land()
                elif now >= self._end:
                    self._statuses[index] = Status.DEADLINE
                else:
                    continue
                del self._pending[index]
            return not self._pending

    def wait(self, timeout: float) -> bool:
        until = self._clock() + timeout
        while not self.done():
            seconds = min(self._next(), until) - self._clock()
            if seconds <= 0 and self._clock() >= until:
                return False
            self._sleep(max(seconds, 0))
        return True

    @property
    def statuses(self) -> Sequence[Status]:
        if not self.done():
            raise InvalidError("the transfer is still in flight: wait for it first")
        return self._statuses

    def cancel(self) -> None:
        with self._lock:
            self._pending.clear()

    def __await__(self) -> Generator[Any, None, Sequence[Status]]:
        while not self.done():
            yield from asyncio.sleep(max(self._next() - self._clock(), 0)).__await__()
        return self._statuses

    def _next(self) -> float:
        """When the next item lands or is given up."""
        with self._lock:
            return min([move.due for move in self._pending.values()] + [self._end])
