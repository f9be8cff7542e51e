"""The tier: what is written, committed, read and deleted, and in which order. Decisions only.

    write    data written ──► synced ──► entry committed ──► announced     (batched)
    delete   entry's deletion committed ──► extent may be written again
    read     bytes into the caller's memory ──► compared with their sums

So whatever instant a crash picks, an entry in the catalogue names bytes that are whole, and nothing
that was announced is missing. The device is reached only through `Disk`, `Catalogue` and `Lanes`,
which do the waiting: no method here blocks. One owner's thread calls everything.

A failing device is not argued with: the tier is marked down, writes are refused and counted, reads
fail, deletions wait; it comes up by itself when the device proves that it works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

from kvpool.proto.chunk import NO_SUMS
from kvpool.store.ssd.condition import Condition
from kvpool.store.ssd.disk import COMMIT_MAX, Catalogue, CatalogueFullError, Disk, ShortReadError
from kvpool.store.ssd.entries import Entry, Extent, SpaceRecord, prologue_sum
from kvpool.store.ssd.lanes import Lane, Lanes
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.speed import Speed
from kvpool.store.ssd.verify import Form, fault
from kvpool.transfer.copying import Bytes

QUEUE_BYTES = 256 << 20
"""Waiting for the device; what is over is dropped and counted, not waited for."""
LOOK_S = 2.0
"""How often the free space is asked for."""
FREE_BYTES_MIN = 16 << 20
"""Below this the tier writes nothing: the catalogue must be able to grow."""
T = TypeVar("T")

_FLAGS = slice(96, 104)  # of a part's header, see kvpool.proto.chunk


class Read(Enum):
    """What became of a read."""

    OK = "ok"
    DAMAGED = "damaged"
    """The bytes are not what was written. They will never be."""
    FAILED = "failed"
    """The device gave nothing this time."""


class Refusal(Enum):
    """Why a write was not taken."""

    DOWN = "down"
    QUEUE_FULL = "queue full"
    NO_ROOM = "no room"


class Piece(NamedTuple):
    """One part that is to be written. `source` must not change until the draft is done."""

    part: int
    generation: int
    source: Bytes
    planes: int


@dataclass(slots=True, eq=False)
class Draft:
    """A chunk on its way to the disk; `kept`: parts that are there already."""

    key: bytes
    space: int
    parent: bytes
    pieces: Sequence[Piece]
    done: Callable[[Entry | None], None]
    """Gets the announced entry, or None if it was not stored."""
    kept: tuple[Extent, ...] = ()
    cancelled: bool = False
    addresses: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(piece.source.size for piece in self.pieces)

    @property
    def entry(self) -> Entry:
        """As it will be in the catalogue. REQUIRES: written."""
        new = (
            Extent(piece.part, address, piece.source.size, piece.generation, content)
            for piece, address, content in zip(self.pieces, self.addresses, self.sums, strict=True)
        )
        return Entry(self.key, self.space, self.parent, tuple(sorted((*self.kept, *new))))


@dataclass(slots=True)
class TierCounters:
    """Events since the start; they only grow."""

    written_chunks: int = 0
    written_bytes: int = 0
    """Of extents, as the store counts them."""
    device_bytes: int = 0
    """The same in whole blocks."""
    read_chunks: int = 0
    read_bytes: int = 0
    deleted_chunks: int = 0
    commits: int = 0
    corrupt_chunks: int = 0
    read_errors: int = 0
    refused_writes: int = 0
    """Chunks that were not taken, or given up: the tier was down, full or had too much to do."""
    unsummed_chunks: int = 0
    """Not written because their writer stored no sums, so they could never be verified."""


class _UnsummedError(ValueError):
    """The source has no plane sums."""


class _UncertainError(OSError):
    """The commit failed, and may be there after a crash or not."""


@dataclass(slots=True)
class _Batch:
    """What goes into one commit, and what that sets free."""

    spaces: list[SpaceRecord] = field(default_factory=list)
    deletes: list[bytes] = field(default_factory=list)
    freeing: list[int] = field(default_factory=list)
    puts: list[Draft] = field(default_factory=list)
    restored: list[Entry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spaces or self.deletes or self.freeing or self.puts or self.restored)

    def __len__(self) -> int:
        return len(self.deletes) + len(self.puts) + len(self.restored)


class Tier:
    """See the module."""

    def __init__(
        self,
        disk: Disk,
        catalogue: Catalogue,
        lanes: Lanes,
        space: Space,
        *,
        clock: Callable[[], float],
        speed: Speed,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.space = space
        self.counters = TierCounters()
        self.condition = Condition()
        self.speed = speed
        self.queue_bytes = queue_bytes
        self.writing_bytes = 0
        """In the queue or on their way."""
        self.reading_bytes = 0
        self.catalogue_figures: dict[str, int] = {}
        """Bytes of the catalogue, some seconds old at most."""
        self.full = ""
        """Why nothing is written although the device works; empty if that is not so."""
        self._disk = disk
        self._catalogue = catalogue
        self._lanes = lanes
        self.clock = clock
        self._batch = _Batch()
        self._committing: _Batch | None = None
        self._suspects: set[int] = set()
        self._look_at = clock()
        self._looking = False

    # ---- writing

    @property
    def busy(self) -> bool:
        """Enough is being written to keep the device busy."""
        return 2 * self.writing_bytes > self.queue_bytes

    @property
    def down(self) -> str:
        """Why the device is not used now, in words; empty if it is."""
        return self.condition.down

    def write(self, draft: Draft) -> Refusal | None:
        """Takes a chunk, whose sources must stay as they are until `draft.done` is called.

        None if it was taken; a refusal is counted, and `done` not called.
        """
        refusal = self._refusal(draft)
        if refusal is not None:
            self.counters.refused_writes += 1
            return refusal
        self.writing_bytes += draft.nbytes
        pieces = list(zip(draft.pieces, draft.addresses, strict=True))

        def work() -> list[int]:
            for piece, address in pieces:
                if int.from_bytes(piece.source[_FLAGS].tobytes(), "little") & NO_SUMS:
                    raise _UnsummedError
                self._disk.write(address, piece.source)
            return [prologue_sum(piece.source, piece.planes) for piece, _ in pieces]

        self._submit(Lane.WRITE, work, partial(self._written, draft))
        return None

    def _refusal(self, draft: Draft) -> Refusal | None:
        if self.down or self.full:
            return Refusal.DOWN
        if self.writing_bytes and self.writing_bytes + draft.nbytes > self.queue_bytes:
            return Refusal.QUEUE_FULL
        found = self.space.allocate([piece.source.size for piece in draft.pieces])
        if found is None:
            return Refusal.NO_ROOM
        draft.addresses = found
        return None

    def cancel(self, draft: Draft) -> None:
        """The chunk is not wanted any more; `done(None)` comes when its sources are free."""
        draft.cancelled = True

    def _written(self, draft: Draft, result: list[int] | Exception) -> None:
        if isinstance(result, Exception):
            if isinstance(result, _UnsummedError):
                self.counters.unsummed_chunks += 1
            else:
                self._failed(result)
            self._discard(draft)
            return
        draft.sums = result
        self._batch.puts.append(draft)
        self._flush()

    def _discard(self, draft: Draft) -> None:
        """Nothing names its extents: they are free at once."""
        self.space.free(draft.addresses)
        self._finish(draft, None)

    def _finish(self, draft: Draft, entry: Entry | None) -> None:
        self.writing_bytes -= draft.nbytes
        draft.done(entry)

    # ---- deleting

    def delete(self, key: bytes) -> None:
        """The announced entry of `key` goes. Its extents are `release`d on their own."""
        self._batch.deletes.append(key)
        self.counters.deleted_chunks += 1

    def release(self, extents: Sequence[Extent]) -> None:
        """Nobody reads these any more, and their entry was deleted: they may be written again as
        soon as that is committed."""
        self._batch.freeing += [extent.address for extent in extents]

    def quarantine(self, extents: Sequence[Extent]) -> None:
        """As `release`, but they are never written again in this life."""
        for extent in extents:
            self.space.quarantine(extent.nbytes)

    @property
    def leaving(self) -> int:
        """Extents that will be free when what waits is committed."""
        on_its_way = len(self._committing.freeing) if self._committing is not None else 0
        return len(self._batch.freeing) + on_its_way

    def add_space(self, record: SpaceRecord) -> None:
        """Makes a namespace known, before the first draft that names its number."""
        self._batch.spaces.append(record)

    # ---- committing

    def flush(self) -> None:
        """Starts to commit what has been collected; call it at the end of a turn."""
        self._flush()

    def _flush(self) -> None:
        if self._committing is not None or self.down:
            return
        self._drop_cancelled()
        if not self._batch:
            return
        batch, self._batch = _split(self._batch)
        if not batch.spaces and not len(batch):
            self.space.free(batch.freeing)
            return
        self._committing = batch
        entries = [*batch.restored, *(draft.entry for draft in batch.puts)]

        def work() -> bool:
            for record in batch.spaces:
                self._catalogue.add_space(record)
            if batch.puts:
                self._disk.sync()
            try:
                self._catalogue.commit(entries, batch.deletes)
            except CatalogueFullError:
                if batch.deletes:
                    self._catalogue.commit([], batch.deletes)
                return False
            except OSError as error:
                raise _UncertainError(str(error)) from error
            return True

        self._submit(Lane.CATALOGUE, work, partial(self._committed, batch))

    def _drop_cancelled(self) -> None:
        dropped = [draft for draft in self._batch.puts if draft.cancelled]
        if dropped:
            self._batch.puts = [draft for draft in self._batch.puts if not draft.cancelled]
            for draft in dropped:
                self._discard(draft)

    def _committed(self, batch: _Batch, result: bool | Exception) -> None:
        self._committing = None
        if isinstance(result, Exception):
            self._not_committed(batch, result)
            return
        self.counters.commits += 1
        self.space.free(batch.freeing)
        if result:
            self._announce(deque(batch.puts))
        else:
            self.counters.refused_writes += len(batch.puts)
            for draft in batch.puts:
                self._discard(draft)
        self._flush()

    def _announce(self, drafts: deque[Draft]) -> None:
        """One now, the rest when the owner has polled again: it has others to serve."""
        if not drafts:
            return
        draft = drafts.popleft()
        if draft.cancelled:
            self._take_back(draft)
        else:
            self.counters.written_chunks += 1
            self.counters.written_bytes += draft.nbytes
            self.counters.device_bytes += sum(
                self.space.rounded(piece.source.size) for piece in draft.pieces
            )
            self._finish(draft, draft.entry)
        if drafts:
            ticket = self.condition.started(self.clock())
            self._lanes.later(partial(self._announce_rest, drafts, ticket))

    def _announce_rest(self, drafts: deque[Draft], ticket: int) -> None:
        self.condition.ended(ticket)
        self._announce(drafts)
        self._flush()  # what was taken back

    def _not_committed(self, batch: _Batch, error: Exception) -> None:
        """What was to be stored is given up; deletions are tried again when the tier is up."""
        self._failed(error)
        later = self._batch
        later.spaces = batch.spaces + later.spaces
        later.deletes = batch.deletes + later.deletes
        later.freeing = batch.freeing + later.freeing
        later.restored = batch.restored + later.restored
        for draft in batch.puts:
            if isinstance(error, _UncertainError):
                self._take_back(draft)
            else:
                self._discard(draft)

    def _take_back(self, draft: Draft) -> None:
        """The catalogue may name it: its extents are free when it does not any more."""
        self._batch.deletes.append(draft.key)
        self._batch.freeing += draft.addresses
        if draft.kept and not draft.cancelled:
            entry = Entry(draft.key, draft.space, draft.parent, draft.kept)
            self._batch.restored.append(entry)
        self._finish(draft, None)

    # ---- reading

    def read(
        self,
        key: bytes,
        extents: Sequence[Extent],
        targets: Sequence[Bytes],
        forms: Sequence[Form],
        done: Callable[[Read, str], None],
    ) -> None:
        """Reads parts of one chunk into `targets` and compares them with their sums.

        `done(verdict, why)`. Until then the targets are written to, and the extents must not be
        released. REQUIRES: not `down`.
        """
        nbytes = sum(extent.nbytes for extent in extents)
        self.reading_bytes += nbytes
        started = self.clock()

        def work() -> str:
            for extent, target, form in zip(extents, targets, forms, strict=True):
                try:
                    self._disk.read(extent.address, target)
                except ShortReadError as error:
                    return str(error)
                wrong = fault(target, form, key, extent)
                if wrong:
                    return f"part {extent.part}: {wrong}"
            return ""

        def finished(result: str | Exception) -> None:
            self.reading_bytes -= nbytes
            if not isinstance(result, Exception):
                self._was_read(nbytes, started, result)
                done(Read.DAMAGED if result else Read.OK, result)
                return
            self.counters.read_errors += 1
            self._failed(result)
            lost = self._blame([extent.address for extent in extents])
            done(Read.DAMAGED if lost else Read.FAILED, str(result))

        self._submit(Lane.READ, work, finished)

    def _was_read(self, nbytes: int, started: float, wrong: str) -> None:
        if wrong:
            self.counters.corrupt_chunks += 1
        else:
            self.counters.read_chunks += 1
            self.counters.read_bytes += nbytes
            self.speed.learn(nbytes, started, self.clock())

    def _blame(self, addresses: Sequence[int]) -> bool:
        """True if reading these has failed before: then it is the place, not the moment."""
        again = bool(self._suspects.intersection(addresses))
        self._suspects.symmetric_difference_update(addresses)
        return again

    def estimate_s(self, nbytes: int) -> float:
        """How long reading `nbytes` would take now, behind what is being read."""
        return self.speed.seconds(self.reading_bytes + nbytes)

    # ---- time

    def tick(self) -> None:
        """Call it every second or so: hangs are noticed, a tier that is down is tried again."""
        now = self.clock()
        if self.condition.wants_check(now):
            self._lanes.submit(Lane.CATALOGUE, self._disk.check, self._checked)
        if self.down:
            self._give_up()
        elif now >= self._look_at and not self._looking:
            self._looking = True
            self._submit(Lane.CATALOGUE, self._look, self._looked)
        self._flush()

    def _checked(self, error: Exception | None) -> None:
        if self.condition.checked(error, self.clock()):
            self._flush()

    def _look(self) -> int:
        """In the catalogue's thread."""
        self.catalogue_figures = self._catalogue.figures()
        return self._disk.free_bytes()

    def _looked(self, free: int | Exception) -> None:
        self._looking = False
        self._look_at = self.clock() + LOOK_S
        if isinstance(free, Exception):
            self._failed(free)
        elif free < FREE_BYTES_MIN:
            self.full = f"the file system has only {free} of {FREE_BYTES_MIN} bytes left"
        else:
            self.full = ""

    @property
    def idle(self) -> bool:
        """Nothing is on its way, and nothing waits for being committed."""
        return not self.condition.in_flight and not self._batch

    def _failed(self, error: Exception) -> None:
        self.condition.failed(str(error) or type(error).__name__, self.clock())
        self._give_up()

    def _give_up(self) -> None:
        """What waits for its commit goes, so that nothing keeps memory while the tier is down."""
        waiting, self._batch.puts = self._batch.puts, []
        for draft in waiting:
            self.counters.refused_writes += 1
            self._discard(draft)

    def _submit(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | Exception], None]
    ) -> None:
        ticket = self.condition.started(self.clock())

        def finished(result: T | Exception) -> None:
            self.condition.ended(ticket)
            done(result)

        self._lanes.submit(lane, work, finished)


def _split(batch: _Batch) -> tuple[_Batch, _Batch]:
    """As much as one commit may have, and the rest. An extent is freed with the last deletion."""
    if len(batch) <= COMMIT_MAX:
        return batch, _Batch()
    now, later = _Batch(spaces=batch.spaces), _Batch(freeing=batch.freeing)
    now.deletes, later.deletes = batch.deletes[:COMMIT_MAX], batch.deletes[COMMIT_MAX:]
    room = COMMIT_MAX - len(now.deletes)
    if later.deletes:  # a put may follow a deletion of the same key, and never the other way
        later.puts, later.restored = batch.puts, batch.restored
        return now, later
    now.restored, later.restored = batch.restored[:room], batch.restored[room:]
    room -= len(now.restored)
    now.puts, later.puts = batch.puts[:room], batch.puts[room:]
    if not later.restored:
        now.freeing, later.freeing = batch.freeing, []
    return now, later
