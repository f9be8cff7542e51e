"""Chunks with real prologues whose bytes say whose they are, and a tier over a simulated disk."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvpool.proto.chunk import plane_sums, sum_seed, write_prologue
from kvpool.proto.layout import native
from kvpool.proto.namespace import Namespace
from kvpool.store.ssd.entries import Entry, SpaceRecord
from kvpool.store.ssd.listing import claim, read_listing
from kvpool.store.ssd.simulated import SimulatedCatalogue, SimulatedDisk, SimulatedLanes
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.speed import Speed
from kvpool.store.ssd.tier import Draft, Piece, Read, Tier
from kvpool.store.ssd.verify import Form, forms_of
from kvpool.transfer.copying import Bytes

BLOCK = 4096
SEGMENT = 64 << 10
TENANT = "default"


def namespace(*nbytes: int, model: str = "test") -> Namespace:
    """One part with two planes per size given."""
    return Namespace(
        model=model,
        revision="1",
        kv_dtype="uint8",
        kv_scales="none",
        layout="native:test",
        chunk_tokens=4,
        parts=tuple(
            native(f"p{i}", layers=("0", "1"), nbytes=size) for i, size in enumerate(nbytes)
        ),
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


SPACE = namespace(4100)
DIGEST = SPACE.digest(TENANT)
FORMS = forms_of(SPACE, DIGEST)
RECORD = SpaceRecord(1, TENANT, DIGEST, SPACE.to_record().SerializeToString(deterministic=True))


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def extent_of(key: bytes, version: int, form: Form = FORMS[0], *, summed: bool = True) -> Bytes:
    """The bytes that write `version` of this chunk stores."""
    extent = np.zeros(form.nbytes, np.uint8)
    payload = extent[form.prologue :]
    noise = hashlib.shake_128(key + version.to_bytes(4, "big")).digest(payload.size)
    payload[:] = np.frombuffer(noise, np.uint8)
    write_prologue(
        extent,
        namespace=form.digest,
        key=key,
        part=form.part,
        generation=version,
        nbytes=payload.size,
        layout_id=form.layout_id,
        sums=plane_sums(payload, form.offsets, sum_seed(key, form.part)) if summed else None,
        planes=form.planes,
    )
    return extent


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Shelf:
    """A tier over a simulated disk, and what was announced by it."""

    segments: int = 4
    seed: int = 0
    before: SimulatedDisk | None = None
    catalogue: SimulatedCatalogue = field(default_factory=SimulatedCatalogue)
    queue_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        self.disk = self.before or SimulatedDisk(self.segments * SEGMENT, BLOCK)
        self.catalogue.faults = self.disk.faults
        self.clock = Clock()
        self.lanes = SimulatedLanes(random.Random(self.seed))
        self.space = Space(1, self.segments * SEGMENT, SEGMENT, BLOCK)
        listing, damaged = read_listing(self.catalogue.pairs(), len(self.catalogue.stored))
        good = claim(listing, self.space)
        assert not damaged and good.all(), "the catalogue contradicts itself"
        self.found = {key: Entry.unpack(key, value) for key, value in self.catalogue.pairs()}
        self.tier = Tier(
            self.disk,
            self.catalogue,
            self.lanes,
            self.space,
            clock=self.clock,
            speed=Speed(1e9),
            queue_bytes=self.queue_bytes,
        )
        self.announced: dict[bytes, Entry] = dict(self.found)
        if not self.catalogue.known:
            self.tier.add_space(RECORD)

    def draft(self, key: bytes, version: int, parent: bytes = b"", *, summed: bool = True) -> Draft:
        def done(entry: Entry | None) -> None:
            if entry is not None:
                self.announced[key] = entry

        piece = Piece(0, version, extent_of(key, version, summed=summed), FORMS[0].planes)
        return Draft(key, 1, parent, [piece], done)

    def store(self, key: bytes, version: int = 1, parent: bytes = b"") -> Entry:
        """Writes and runs until it is announced."""
        assert self.tier.write(self.draft(key, version, parent)) is None
        self.lanes.run()
        return self.announced[key]

    def delete(self, key: bytes) -> None:
        """As the store does it with a chunk that nobody holds."""
        entry = self.announced.pop(key)
        self.tier.delete(key)
        self.tier.release(entry.extents)
        self.tier.flush()

    def read(self, entry: Entry) -> tuple[Read, str, bytes]:
        """Runs until it is there."""
        target = np.zeros(FORMS[0].nbytes, np.uint8)
        out: list[tuple[Read, str]] = []
        done: Callable[[Read, str], None] = lambda verdict, why: out.append((verdict, why))  # noqa: E731
        self.tier.read(entry.key, entry.extents, [target], FORMS, done)
        self.lanes.run()
        return (*out[0], target.tobytes())

    def after_crash(self) -> Shelf:
        """The same files in the hands of the next process."""
        dice = random.Random(self.seed)
        disk, catalogue = self.disk.after_crash(dice), self.catalogue.after_crash()
        return Shelf(self.segments, self.seed + 1, disk, catalogue)
