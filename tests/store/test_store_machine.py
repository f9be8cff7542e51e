"""Anything may happen in any order, and a pull is still a miss or exactly one publish's bytes.

The machine drives a real store over real bytes: writers that are slow, dead or late, readers that
copy long after they matched, and an operator who deletes. It keeps its own idea of what was
published (a dict: the last completed write of each key and part) and of who holds which extents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.proto.errors import BusyError
from kvpool.proto.outcomes import Outcome
from kvpool.store.store import KnownNamespace, StoreSession
from tests.store.world import World, blob, extents, granted, part

LEASE_S = 30.0
Path = tuple[int, ...]
"""A place in the tree of all chains; its key commits to the path."""
Name = tuple[int, Path]
"""A namespace and a path."""


def key(path: Path) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


def keys(paths: list[Path]) -> bytes:
    return b"".join(key(path) for path in paths)


def down(path: Path, first: int = 1) -> list[Path]:
    """The chain that ends in `path`, from depth `first` on."""
    return [path[:depth] for depth in range(first, len(path) + 1)]


@dataclass(eq=False)
class Holding:
    """Extents that somebody may touch: (name, part) → (address, generation)."""

    session: StoreSession
    known: KnownNamespace
    lease: bytes
    deadline: float
    extents: dict[tuple[Name, int], tuple[int, int]]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(address, end, generation)"""
        for (_, part_), (address, generation) in self.extents.items():
            yield address, address + self.known.extent_bytes[part_], generation


@dataclass(eq=False)
class Pull(Holding):
    """`kept`: names whose chunk is protected; a delete takes them out."""

    kept: set[Name]


@dataclass(eq=False)
class Write(Holding):
    """`numbers`: what is still open, by item number."""

    numbers: dict[int, tuple[Name, int]]


PATHS = st.sampled_from(
    [(0, 0, 0, 0), (0, 0, 0), (0, 0), (0,), (0, 0, 1), (0, 1), (0, 1, 0, 0), (1,), (1, 0)]
)
PICK = st.integers(0, 20)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(segments=4, chunks=30, options={"quarantine_share": 0.2})
        self.store = self.world.store
        self.spaces = [
            self.world.open(part("all", 2048)),
            self.world.open(part("a", 1024), part("b", 2048), part("w", 512, window=20), model="2"),
            self.world.open(part("all", 4096), tenant="blue", model="3"),
        ]
        self.sessions: list[StoreSession] = []
        for tenant, mapped in (("red", True), ("red", True), ("red", False), ("blue", True)):
            self.sessions.append(self.world.session(tenant, mapped=mapped))
        self.completed: dict[tuple[Name, int], int] = {}
        self.deleted: set[Name] = set()
        self.pins: dict[Name, set[Name]] = {}
        self.claims: dict[Name, list[float]] = {}
        self.pulls: list[Pull] = []
        self.writes: list[Write] = []
        self.floods = 0

    @initialize(pick=PICK, path=PATHS)
    def something_is_stored(self, pick: int, path: Path) -> None:
        self.publish(pick, path, 1)
        self.publish(pick + 1, path, 1)

    # ---- choosing

    def party(self, pick: int) -> tuple[StoreSession, KnownNamespace]:
        """A session and one of its namespaces."""
        session = self.sessions[pick % len(self.sessions)]
        mine = [known for known in self.spaces if known.tenant == session.tenant]
        return session, mine[pick // 4 % len(mine)]

    def may_touch(self, holding: Holding) -> bool:
        """Mapped sessions copy whenever they like; others only while their right lasts."""
        return holding.session.mapped or self.world.clock.now < holding.deadline

    # ---- reading

    @rule(pick=PICK, path=PATHS)
    def pull(self, pick: int, path: Path) -> None:
        """Match, copy at once, release."""
        pull = self.start_pull(pick, path)
        if pull:
            self.copy(pull)
            self.end_pull(pull)

    @precondition(lambda self: self.completed)
    @rule(pick=PICK, late=st.booleans())
    def read_what_is_there(self, pick: int, late: bool) -> None:
        """As `pull` or `match`."""
        (namespace, path), _ = list(self.completed)[pick % len(self.completed)]
        tenant = self.known(namespace).tenant
        first = next(i for i, session in enumerate(self.sessions) if session.tenant == tenant)
        space = [known.id for known in self.spaces if known.tenant == tenant].index(namespace)
        (self.match if late else self.pull)(first + 4 * space, path)

    @rule(pick=PICK, path=PATHS)
    def match(self, pick: int, path: Path) -> None:
        """Match, and copy some time later, or never."""
        pull = self.start_pull(pick, path)
        if pull:
            self.pulls.append(pull)

    def start_pull(self, pick: int, path: Path) -> Pull | None:
        session, known = self.party(pick)
        names = [(known.id, step) for step in down(path)]
        try:
            match = self.store.match(session, known.id, keys(down(path)), lease_s=LEASE_S)
        except BusyError:
            self.expect_over_quarantine(session)
            return None
        if not match.hits:
            return None
        found = {
            (names[i], part_): (address, generation)
            for (i, part_), address, generation in extents(match, len(known.extent_bytes))
        }
        for item, (_, generation) in found.items():
            assert self.completed.get(item) == generation, "served what was never completed"
        needed = known.namespace.part_indices(known.prefix_mask)
        assert all((name, p) in found for name in names[: match.hits] for p in needed)
        for p, chunks in known.windows:
            last = names[max(0, match.hits - chunks) : match.hits]
            assert all((name, p) in found for name in last)
        deadline = self.world.clock.now + LEASE_S
        return Pull(session, known, match.lease, deadline, found, set(names[: match.hits]))

    @precondition(lambda self: self.pulls)
    @rule(pick=PICK)
    def copy_late(self, pick: int) -> None:
        """After expiry, deletion and whatever the others did."""
        self.copy(self.pulls[pick % len(self.pulls)])

    def copy(self, pull: Pull) -> None:
        if self.may_touch(pull):
            for ((_, path), part_), (address, generation) in pull.extents.items():
                nbytes = pull.known.extent_bytes[part_]
                expected = blob(key(path), part_, generation, nbytes)
                assert self.world.read(address, nbytes) == expected, "other bytes than published"

    @precondition(lambda self: self.pulls)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        pull = self.pulls.pop(pick % len(self.pulls))
        self.copy(pull)
        self.end_pull(pull)

    def end_pull(self, pull: Pull) -> None:
        gone = not pull.session.mapped and pull.deadline <= self.world.clock.now
        outcome = self.store.release(pull.session, pull.lease)
        assert outcome is Outcome.OK or (gone and outcome is Outcome.STALE_EPOCH)
        if not any(p.lease == pull.lease and p.session is pull.session for p in self.pulls):
            assert self.store.release(pull.session, pull.lease) is Outcome.STALE_EPOCH

    @precondition(lambda self: self.pulls)
    @rule(pick=PICK, session=PICK)
    def adopt(self, pick: int, session: int) -> None:
        pull = self.pulls[pick % len(self.pulls)]
        other = self.sessions[session % len(self.sessions)]
        try:
            match = self.store.adopt(other, pull.lease)
        except BusyError:
            self.expect_over_quarantine(other)
            return
        if other.tenant != pull.session.tenant:
            assert match.outcome is Outcome.STALE_EPOCH
        elif pull.deadline <= self.world.clock.now:
            assert match.outcome in (Outcome.EXPIRED, Outcome.STALE_EPOCH)
        else:
            assert match.outcome is Outcome.HIT
            got = [(a, g) for _, a, g in extents(match, len(pull.known.extent_bytes))]
            assert set(pull.extents.values()) <= set(got)
            self.pulls.append(
                Pull(other, pull.known, pull.lease, pull.deadline, pull.extents, pull.kept)
            )

    @precondition(lambda self: self.pulls)
    @rule(pick=PICK)
    def renew(self, pick: int) -> None:
        pull = self.pulls[pick % len(self.pulls)]
        now = self.world.clock.now
        outcome = self.store.renew(pull.session, pull.lease, LEASE_S)
        if pull.deadline <= now:
            assert outcome in (Outcome.EXPIRED, Outcome.STALE_EPOCH)
        else:
            assert outcome is Outcome.OK
            for other in self.pulls:
                if other.lease == pull.lease:
                    other.deadline = max(other.deadline, now + LEASE_S)

    # ---- writing

    @rule(pick=PICK, path=PATHS, first=st.integers(1, 3))
    def publish(self, pick: int, path: Path, first: int) -> None:
        """Whole: reserve, write, commit."""
        write = self.start_write(pick, path, first)
        if write:
            self.scribble(write)
            self.finish(write, list(write.numbers))

    @rule(pick=PICK, path=PATHS, first=st.integers(1, 3), parts=st.integers(0, 7))
    def reserve(self, pick: int, path: Path, first: int, parts: int) -> None:
        """Reserve, and write some time later, or never."""
        write = self.start_write(pick, path, first, parts)
        if write:
            self.writes.append(write)

    def start_write(self, pick: int, path: Path, first: int, parts: int = 0) -> Write | None:
        session, known = self.party(pick)
        first = min(first, len(path))
        parts &= known.namespace.all_parts
        indices = known.namespace.part_indices(parts)
        chain = down(path, first)
        parent = key(path[: first - 1]) if first > 1 else b""
        try:
            got = self.store.reserve(session, known.id, parent, keys(chain), parts, LEASE_S)
        except BusyError:
            self.expect_over_quarantine(session)
            return None
        if (got.outcomes == Outcome.BUSY).any():
            assert "evictable" in got.text
        found: dict[tuple[Name, int], tuple[int, int]] = {}
        numbers: dict[int, tuple[Name, int]] = {}
        for (i, j), address, generation in granted(got):
            assert got.outcomes[i, j] == Outcome.OK
            item = ((known.id, chain[i]), indices[j])
            found[item] = address, generation
            numbers[i * len(indices) + j] = item
        assert len(found) == (got.outcomes == Outcome.OK).sum()
        deadline = self.world.clock.now + LEASE_S
        return Write(session, known, got.lease, deadline, found, numbers) if found else None

    def scribble(self, write: Write) -> None:
        """A writer may do that as long as it lives, overdue or not."""
        if self.may_touch(write):
            for item in write.numbers.values():
                ((_, path), part_), (address, generation) = item, write.extents[item]
                nbytes = write.known.extent_bytes[part_]
                self.world.write(address, blob(key(path), part_, generation, nbytes))

    @precondition(lambda self: self.writes)
    @rule(pick=PICK)
    def scribble_late(self, pick: int) -> None:
        self.scribble(self.writes[pick % len(self.writes)])

    @precondition(lambda self: self.writes)
    @rule(pick=PICK, share=st.integers(1, 4))
    def commit(self, pick: int, share: int) -> None:
        """Some of the open items, or all."""
        write = self.writes[pick % len(self.writes)]
        self.scribble(write)
        self.finish(write, sorted(write.numbers)[: -(-len(write.numbers) * share // 4)])

    def finish(self, write: Write, numbers: list[int]) -> None:
        outcomes = self.store.commit(write.session, write.lease, numbers)
        overdue = write.deadline <= self.world.clock.now
        for number, outcome in zip(numbers, outcomes, strict=True):
            if overdue:
                assert outcome in (Outcome.EXPIRED, Outcome.STALE_EPOCH)
                continue
            item = write.numbers.pop(number)
            (namespace, path), _ = name, part_ = item
            if outcome is Outcome.OK:
                above = (namespace, path[:-1])
                assert len(path) == 1 or any(n == above for n, _ in self.completed)
                assert self.resident(name, write.known), "committed but not there"
                self.completed[name, part_] = write.extents[item][1]
            else:
                assert outcome in (Outcome.NO_PARENT, Outcome.EXPIRED)
                assert outcome is Outcome.NO_PARENT or name in self.deleted
            del write.extents[item]
        if not overdue and not write.numbers:
            self.drop_write(write)

    def drop_write(self, write: Write) -> None:
        if write in self.writes:
            self.writes.remove(write)

    @precondition(lambda self: self.writes)
    @rule(pick=PICK, whole=st.booleans())
    def abort(self, pick: int, whole: bool) -> None:
        write = self.writes[pick % len(self.writes)]
        numbers = list(write.numbers) if whole else list(write.numbers)[:1]
        outcome = self.store.abort(write.session, write.lease, numbers)
        gone = not write.session.mapped and write.deadline <= self.world.clock.now
        assert outcome is Outcome.OK or (gone and outcome is Outcome.STALE_EPOCH)
        for number in numbers:
            del write.extents[write.numbers.pop(number)]
        if not write.numbers:
            self.drop_write(write)

    @rule(pick=PICK, count=st.integers(1, 6))
    def flood(self, pick: int, count: int) -> None:
        """Chains that nobody asks for, to push out the others."""
        for _ in range(count):
            self.floods += 1
            self.publish(pick, (2, self.floods // 200, self.floods % 200), 1)

    # ---- endings

    @rule(pick=PICK)
    def session_dies(self, pick: int) -> None:
        """And a new one takes its place."""
        at = pick % len(self.sessions)
        session = self.sessions[at]
        self.store.close_session(session)
        self.pulls = [pull for pull in self.pulls if pull.session is not session]
        self.writes = [write for write in self.writes if write.session is not session]
        self.sessions[at] = self.world.session(session.tenant, mapped=session.mapped)

    @rule(seconds=st.sampled_from([0.0, 1.0, 29.0, 31.0, 3e7]), reap=st.booleans())
    def time_passes(self, seconds: float, reap: bool) -> None:
        self.world.clock.now += seconds
        if reap:
            self.reap()

    @rule()
    def reap(self) -> None:
        self.store.reap()
        for ends in self.claims.values():
            ends[:] = [end for end in ends if end > self.world.clock.now]
        self.drop_pins_without_claims()

    @rule(pick=PICK, path=PATHS, ttl_s=st.sampled_from([0.0, 20.0]))
    def pin(self, pick: int, path: Path, ttl_s: float) -> None:
        session, known = self.party(pick)
        outcomes = self.store.pin(session, known.id, keys(down(path)), ttl_s)
        name = (known.id, path)
        hits = outcomes.count(Outcome.HIT)
        if hits:
            self.pins.setdefault(name, set()).update((known.id, s) for s in down(path)[:hits])
            end = self.world.clock.now + ttl_s if ttl_s else float("inf")
            self.claims.setdefault(name, []).append(end)

    @precondition(lambda self: self.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        name = list(self.pins)[pick % len(self.pins)]
        namespace, path = name
        session = next(s for s in self.sessions if s.tenant == self.known(namespace).tenant)
        assert self.store.unpin(session, namespace, keys(down(path))) is Outcome.OK
        self.claims[name].remove(min(self.claims[name]))
        self.drop_pins_without_claims()
        if name not in self.pins:
            assert self.store.unpin(session, namespace, keys(down(path))) is Outcome.MISS

    def drop_pins_without_claims(self) -> None:
        for name in [name for name, ends in self.claims.items() if not ends]:
            del self.pins[name], self.claims[name]

    @rule(pick=PICK, path=PATHS)
    def cut_and_mend(self, pick: int, path: Path) -> None:
        """Delete in the middle of a chain, publish what is missing, read again."""
        self.publish(pick, path, 1)
        self.delete(pick, path[:2], whole=False, corrupt=True)
        self.pull(pick, path)
        self.publish(pick, path, 2)
        self.pull(pick, path)

    @rule(pick=PICK, path=PATHS, whole=st.booleans(), corrupt=st.booleans())
    def delete(self, pick: int, path: Path, whole: bool, corrupt: bool) -> None:
        session, known = self.party(pick)
        paths = down(path, 1 if whole else len(path))
        before = [self.resident((known.id, step), known) for step in paths]
        outcomes = self.store.delete(session, known.id, keys(paths), corrupt=corrupt)
        assert outcomes == [Outcome.OK if there else Outcome.MISS for there in before]
        self.forget([(known.id, step) for step in paths])

    @precondition(lambda self: self.floods)
    @rule(pick=PICK)
    def clear(self, pick: int) -> None:
        session, known = self.party(pick)
        self.store.clear(session, known.id)
        names = {name for name, _ in self.completed} | {
            item[0] for write in self.writes for item in write.numbers.values()
        }
        self.forget([name for name in names if name[0] == known.id])
        for name in [name for name in self.pins if name[0] == known.id]:
            del self.pins[name], self.claims[name]
        assert not self.listed(session, known)

    def forget(self, names: list[Name]) -> None:
        self.deleted.update(names)
        for name in names:
            for pinned in self.pins.values():
                pinned.discard(name)
            for pull in self.pulls:
                pull.kept.discard(name)
            for part_ in range(3):
                self.completed.pop((name, part_), None)

    # ---- asking

    def known(self, namespace: int) -> KnownNamespace:
        return next(known for known in self.spaces if known.id == namespace)

    def asker(self, known: KnownNamespace) -> StoreSession:
        return next(s for s in self.sessions if s.tenant == known.tenant)

    def resident(self, name: Name, known: KnownNamespace) -> bool:
        [told] = self.store.explain(self.asker(known), known.id, key(name[1]))
        return told.parts != 0

    def listed(self, session: StoreSession, known: KnownNamespace) -> set[bytes]:
        packed, _, following = self.store.keys(session, known.id)
        assert following == 0
        return {packed[i : i + 32] for i in range(0, len(packed), 32)}

    def expect_over_quarantine(self, session: StoreSession) -> None:
        bound = self.store.options.quarantine_share * self.store.capacity_bytes
        assert session.quarantined_bytes > bound

    # ---- what always holds

    @invariant()
    def the_structures_agree(self) -> None:
        self.store.check_integrity()

    @invariant()
    def no_two_extents_in_use_overlap(self) -> None:
        taken = {
            r
            for holding in (*self.pulls, *self.writes)
            if self.may_touch(holding)
            for r in holding.ranges()
        }
        for (_, end, _), (start, _, _) in pairwise(sorted(taken)):
            assert end <= start

    @invariant()
    def what_is_leased_or_pinned_stays(self) -> None:
        kept = set().union(*self.pins.values(), *(p.kept for p in self.pulls if self.may_touch(p)))
        for name in kept:
            assert self.resident(name, self.known(name[0])), f"{name} went"

    @invariant()
    def the_resident_set_is_prefix_closed_below_what_was_never_deleted(self) -> None:
        paths = {key(path): path for (_, path), _ in self.completed}
        for known in self.spaces:
            listed = self.listed(self.asker(known), known)
            assert listed <= paths.keys(), "lists what was never completed, or was deleted"
            for path in (paths[name] for name in listed):
                above = [step for step in down(path)[:-1] if key(step) not in listed]
                assert all((known.id, step) in self.deleted for step in above[-1:])
                if above:
                    [told] = self.store.explain(self.asker(known), known.id, key(path))
                    assert told.outcome is Outcome.MISS, "an orphan is not servable"

    def teardown(self) -> None:
        """Everything is let go: nothing may be left."""
        for write in self.writes:
            self.store.abort(write.session, write.lease)
        for pull in self.pulls:
            self.store.release(pull.session, pull.lease)
        self.world.clock.now += 1e9
        self.store.reap()
        store = self.store
        assert len(store.leases) == 0 and store.leases.opened == store.leases.ended
        figures = store.figures()
        assert figures["leased"] == figures["writing"] == figures["quarantined"] == 0
        assert all(session.quarantined_bytes == 0 for session in self.sessions)
        store.check_integrity()
        for session in self.sessions:
            store.clear(session)
            store.close_session(session)
        store.check_integrity()
        assert store.index.count == 0 and store.figures()["stored"] == 0
        assert self.world.used_bytes() == 0
        assert store.allocator and store.allocator.statistics().free_segments == 4


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
