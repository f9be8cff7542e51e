"""A store with real bytes above a tier on a simulated disk; time and threads are the test's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.store.learned import Learned
from kvpool.store.records import Loading
from kvpool.store.ssd.attached import Ssd
from kvpool.store.ssd.listing import claim, read_listing
from kvpool.store.ssd.shelf import Shelf, usable
from kvpool.store.ssd.simulated import SimulatedCatalogue, SimulatedDisk, SimulatedLanes
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.speed import Speed
from kvpool.store.ssd.tier import Tier
from kvpool.store.ssd.verify import forms_of
from kvpool.store.store import KnownNamespace, Match, Store, StoreOptions
from kvpool.transfer.copying import Bytes
from tests.ssd.samples import BLOCK, RECORD, SEGMENT, SPACE, TENANT, Clock, extent_of, key_of
from tests.store.world import Entropy


def chain(name: str, length: int) -> list[bytes]:
    return [key_of(f"{name}/{at}") for at in range(length)]


class World:
    """Memory for about `room` chunks, an SSD of `segments` with five chunks each."""

    def __init__(
        self,
        room: int = 7,
        segments: int = 10,
        *,
        seed: int = 0,
        write_through: bool = False,
        policy: str = "lru",
        admission: str = "always",
        disk: SimulatedDisk | None = None,
        catalogue: SimulatedCatalogue | None = None,
        learned: Learned | None = None,
    ) -> None:
        self.seed = seed
        self.clock = Clock()
        memory_bytes = -(-room * 8448 // 4096) * 4096
        options = StoreOptions(memory_bytes, 1000, memory_bytes, policy=policy)
        self.store = Store(options, clock=self.clock, entropy=Entropy(), learned=learned)
        self.store.add_region()
        self.memory = np.zeros(memory_bytes, np.uint8)
        self.known: KnownNamespace = self.store.open_namespace(TENANT, SPACE)[0]
        self.form = forms_of(SPACE, self.known.digest)[0]
        self.disk = disk or SimulatedDisk(segments * SEGMENT, BLOCK)
        self.catalogue = catalogue or SimulatedCatalogue()
        self.catalogue.faults = self.disk.faults
        self.lanes = SimulatedLanes(random.Random(seed))
        space = Space(1, self.disk.nbytes, SEGMENT, BLOCK)
        listing, damaged = read_listing(self.catalogue.pairs(), len(self.catalogue.stored))
        assert not damaged and claim(listing, space).all()
        assert usable(listing, lambda number: self.known.extent_bytes).all()
        self.tier = Tier(
            self.disk, self.catalogue, self.lanes, space, clock=self.clock, speed=Speed(1e9)
        )
        shelf = Shelf(self.tier, 1000, policy, seed, self.store.room.lessons)
        if self.catalogue.known:
            shelf.meet(self.known, RECORD.number)
        shelf.load(listing, lambda number: self.known)
        self.ssd = Ssd(
            self.store, shelf, self.view, write_through=write_through, admission=admission
        )
        self.store.ssd = self.ssd
        self.session = self.store.open_session(TENANT, mapped=True)

    def view(self, address: int, nbytes: int) -> Bytes:
        return self.memory[address : address + nbytes]

    def switch(self, namespace: Namespace) -> None:
        """From now on chunks of this one are meant."""
        self.known = self.store.open_namespace(TENANT, namespace)[0]
        self.form = forms_of(namespace, self.known.digest)[0]

    def settle(self) -> None:
        """All that should be written is written, and all work is done."""
        for _ in range(50):
            self.ssd.turn()
            if not self.lanes.waiting:
                return
            self.lanes.run()

    def publish(self, keys: Sequence[bytes], parent: bytes = b"", version: int = 1) -> list[int]:
        """The outcomes; what is granted is written and committed."""
        packed = b"".join(keys)
        reserved = self.store.reserve(self.session, self.known.id, parent, packed)
        extents = np.frombuffer(reserved.extents, np.int64).reshape(-1, 2)
        for key, (address, generation) in zip(keys, extents.tolist(), strict=True):
            if address >= 0:
                content = extent_of(key, generation, self.form)
                self.memory[address : address + content.size] = content
        if reserved.lease:
            self.store.commit(self.session, reserved.lease)
        return [int(outcome) for outcome in reserved.outcomes[:, 0]]

    def flood(self, count: int = 20) -> None:
        """Other chunks take the memory, and what they push out is written first."""
        for at in range(count):
            self.publish([key_of(f"flood/{self.clock.now}/{at}")])
            self.clock.now += 0.001
            self.settle()

    def compute(self, keys: Sequence[bytes], seconds: float) -> None:
        """As an engine does: looks, computes what is not there, publishes it."""
        assert not self.match(keys).lease
        self.clock.now += seconds
        self.publish(keys)
        self.settle()

    def match(self, keys: Sequence[bytes], **options: float) -> Match:
        return self.store.match(self.session, self.known.id, b"".join(keys), **options)  # type: ignore[arg-type]

    def load(self, match: Match, upto: int = 0) -> Loading:
        """Until nothing is pending."""
        while (loading := self.store.load(self.session, match.lease, upto)).pending:
            assert self.lanes.step(), "it waits for nothing"
        return loading

    def pull(self, keys: Sequence[bytes]) -> int:
        """Matches, loads, checks every byte, releases; the chunks that were had."""
        match = self.match(keys)
        if not match.lease:
            return 0
        loading = self.load(match)
        extents = np.frombuffer(loading.extents, np.int64).reshape(-1, 2)
        assert len(extents) == loading.chunks
        for key, (address, generation) in zip(keys, extents.tolist(), strict=False):
            found = self.view(address, self.form.nbytes)
            assert np.array_equal(found, extent_of(key, generation, self.form))
        assert self.store.release(self.session, match.lease) is Outcome.OK
        return loading.chunks

    def in_memory(self, keys: Sequence[bytes]) -> int:
        """Leading chunks that are in memory."""
        return self.match(keys, peek=True).hits

    def after_crash(self) -> World:
        """The next process on the same disk; memory is gone."""
        dice = random.Random(self.seed)
        return World(
            len(self.memory) // 8448,
            seed=self.seed + 1,
            disk=self.disk.after_crash(dice),
            catalogue=self.catalogue.after_crash(),
        )

    def check(self) -> None:
        """Nothing is held any more, and all structures agree."""
        self.settle()
        assert self.tier.idle and not self.tier.writing_bytes and not self.tier.reading_bytes
        self.store.check_integrity()
        self.ssd.shelf.check_integrity()
        assert len(self.store.leases) == 0 and not self.store.index.writing
        index = self.ssd.shelf.index
        assert not index.leases.any()
        entries = set(self.catalogue.stored)
        assert entries == {index.key_bytes(row) for row in index.linked_rows().tolist()}
