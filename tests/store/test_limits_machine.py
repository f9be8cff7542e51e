"""Reserves, quotas and pins hold whatever three tenants of one pool do.

The model is arithmetic over what was published: each tenant publishes chains of two sizes of
chunks and never deletes, so what a tenant holds are those of its chunks that a look finds. It
knows nothing of how victims are chosen.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.proto.errors import BusyError
from kvpool.proto.outcomes import Outcome
from kvpool.store.accounts import Limits
from kvpool.store.store import KnownNamespace
from tests.store.world import SEGMENT, World, chain, part

CAPACITY = 4 * SEGMENT
RESERVE = 2 * SEGMENT // 2
QUOTA = SEGMENT + SEGMENT // 2
PINNED_SHARE = 0.75
LIMITS = {"kept": Limits(reserve=RESERVE), "small": Limits(quota=QUOTA)}
TENANTS = ("kept", "small", "free")
SIZES = (2048, 4096)

TENANT = st.sampled_from(TENANTS)
SIZE = st.sampled_from(SIZES)
NAME = st.sampled_from("abcdef")
LENGTH = st.integers(1, 6)


class LimitsMachine(RuleBasedStateMachine):
    policy = "phz"

    def __init__(self) -> None:
        super().__init__()
        options = {"limits": LIMITS, "pinned_share": PINNED_SHARE, "policy": self.policy}
        self.world = World(segments=4, chunks=60, options=options)
        self.store = self.world.store
        self.sessions = {tenant: self.world.session(tenant) for tenant in TENANTS}
        self.spaces = {
            (tenant, size): self.world.open(part("all", size), tenant=tenant, model=str(size))
            for tenant in TENANTS
            for size in SIZES
        }
        self.published: dict[tuple[str, int], set[bytes]] = {space: set() for space in self.spaces}
        self.claims: dict[tuple[str, int, str, int], tuple[int, int]] = {}
        """(tenant, size, name, length) of the chain → (claims, chunks that are pinned)."""

    # ---- what tenants do

    @rule(tenant=TENANT, size=SIZE, name=NAME, length=LENGTH)
    def publish(self, tenant: str, size: int, name: str, length: int) -> None:
        session, known = self.sessions[tenant], self.spaces[tenant, size]
        keys = chain(f"{tenant}/{size}/{name}", length)
        told = self.world.hits(session, known, keys)
        if told == length:
            return
        before = {other: self.held(other) for other in TENANTS}
        evicted = self.store.counters.evicted_chunks
        allocator = self.store.allocator
        slots = allocator.free_slots(size) if allocator else 0  # not of other sizes
        parent = keys[told - 1] if told else b""
        got = self.store.reserve(session, known.id, parent, b"".join(keys[told:]))
        self.world.fill(known, got, keys[told:])
        outcomes = got.outcomes.ravel().tolist()
        if got.lease:
            assert set(self.store.commit(session, got.lease)) == {Outcome.OK}
        stored = outcomes.count(Outcome.OK)
        self.published[tenant, size].update(keys[told : told + stored])
        after = {other: self.held(other) for other in TENANTS}
        for other in set(TENANTS) - {tenant}:
            reserve = LIMITS.get(other, Limits()).reserve
            assert after[other] >= min(before[other], reserve), "took what is reserved"
        if stored == 0:
            assert self.store.counters.evicted_chunks == evicted, "evicted for nothing"
        if stored < len(outcomes):
            assert set(outcomes[stored:]) == {Outcome.BUSY} and "evictable" in got.text
            if tenant == "small":
                assert f"holds {after[tenant]} of {QUOTA}" in got.text
        if tenant == "small" and before[tenant] + len(outcomes) * size > QUOTA:
            others = [after[other] == before[other] for other in ("kept", "free")]
            assert all(others) or slots < len(outcomes), "others paid for its quota"

    @rule(tenant=TENANT, size=SIZE, name=NAME, length=LENGTH)
    def pull(self, tenant: str, size: int, name: str, length: int) -> None:
        keys = chain(f"{tenant}/{size}/{name}", length)
        self.world.pull(self.sessions[tenant], self.spaces[tenant, size], keys)

    @rule(tenant=TENANT, size=SIZE, name=NAME, length=LENGTH)
    def pin(self, tenant: str, size: int, name: str, length: int) -> None:
        session, known = self.sessions[tenant], self.spaces[tenant, size]
        keys = chain(f"{tenant}/{size}/{name}", length)
        hits = self.world.hits(session, known, keys)
        before = self.pinned()
        chain_name = (tenant, size, name, length)
        claims, chunks = self.claims.get(chain_name, (0, 0))
        try:
            outcomes = self.store.pin(session, known.id, b"".join(keys))
        except BusyError as error:
            wanted = before[tenant] + size * hits
            others = sum(limits.reserve for name, limits in LIMITS.items() if name != tenant)
            beyond = sum(before.values()) + size * hits > PINNED_SHARE * CAPACITY
            assert beyond or wanted > CAPACITY - others
            assert str(sum(before.values())) in str(error) and self.pinned() == before
            return
        assert outcomes == [Outcome.HIT] * hits + [Outcome.MISS] * (length - hits)
        if hits:
            self.claims[chain_name] = claims + 1, max(chunks, hits)

    @rule(pick=st.integers(0, 20))
    def unpin(self, pick: int) -> None:
        if not self.claims:
            return
        chain_name = list(self.claims)[pick % len(self.claims)]
        tenant, size, name, length = chain_name
        keys = b"".join(chain(f"{tenant}/{size}/{name}", length))
        session, known = self.sessions[tenant], self.spaces[tenant, size]
        assert self.store.unpin(session, known.id, keys) is Outcome.OK
        claims, chunks = self.claims.pop(chain_name)
        if claims > 1:
            self.claims[chain_name] = claims - 1, chunks

    # ---- the model

    def found(self, tenant: str, size: int) -> set[bytes]:
        """Those of the published chunks that are there."""
        session, known = self.sessions[tenant], self.spaces[tenant, size]
        names = list(self.published[tenant, size])
        told = self.store.explain(session, known.id, b"".join(names)) if names else []
        return {key for key, one in zip(names, told, strict=True) if one.parts}

    def held(self, tenant: str) -> int:
        return sum(size * len(self.found(tenant, size)) for size in SIZES)

    def pinned(self) -> dict[str, int]:
        kept: dict[tuple[str, int], set[bytes]] = {space: set() for space in self.spaces}
        for (tenant, size, name, _), (_, chunks) in self.claims.items():
            kept[tenant, size].update(chain(f"{tenant}/{size}/{name}", chunks))
        return {tenant: sum(size * len(kept[tenant, size]) for size in SIZES) for tenant in TENANTS}

    @invariant()
    def nobody_exceeds_a_quota_or_the_bound_of_pins(self) -> None:
        assert self.held("small") <= QUOTA
        assert sum(self.pinned().values()) <= PINNED_SHARE * CAPACITY

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        for (tenant, size, name, _), (_, chunks) in self.claims.items():
            keys = chain(f"{tenant}/{size}/{name}", chunks)
            assert set(keys) <= self.found(tenant, size)

    @invariant()
    def the_store_counts_what_the_model_counts(self) -> None:
        self.store.check_integrity()
        pinned = self.pinned()
        for account in self.store.room.accounts:
            assert account.used == self.held(account.tenant)
            assert account.pinned == pinned[account.tenant]
        figures = self.store.figures()
        assert figures["pinned"] == sum(pinned.values())
        assert figures["evictable"] == figures["stored"] - figures["pinned"]


class LruLimitsMachine(LimitsMachine):
    policy = "lru"


TestLimits = LimitsMachine.TestCase
TestLimits.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLruLimits = LruLimitsMachine.TestCase
TestLruLimits.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def one(world: World, tenant: str, size: int = 4096) -> KnownNamespace:
    return world.open(part("all", size), tenant=tenant, model=str(size))


def test_a_flood_of_ten_times_the_pool_leaves_a_tenants_reserve() -> None:
    """EV-9"""
    world = World(options={"limits": {"kept": Limits(reserve=4 * 4096)}})
    kept, known = world.session("kept"), one(world, "kept")
    world.publish(kept, known, chain("kept", 6))
    flood, other = world.session("flood"), one(world, "flood")
    for number in range(10 * CAPACITY // 4096):
        world.publish(flood, other, chain(f"flood/{number}", 1))
    assert world.hits(kept, known, chain("kept", 6)) == 4
    world.store.check_integrity()


def test_a_tenant_at_its_quota_evicts_one_of_its_own_per_chunk_and_nobody_elses() -> None:
    world = World(options={"limits": {"small": Limits(quota=4 * 4096)}})
    free, known = world.session("free"), one(world, "free")
    world.publish(free, known, chain("free", 12))
    small, mine = world.session("small"), one(world, "small")
    for number in range(8):
        world.publish(small, mine, chain(f"small/{number}", 1))
    assert world.hits(free, known, chain("free", 12)) == 12
    assert [world.hits(small, mine, chain(f"small/{number}", 1)) for number in range(8)] == [
        *[0] * 4,
        *[1] * 4,
    ]
    assert world.store.counters.evictions == {"quota": 4}


def test_what_exceeds_its_quota_is_busy_with_figures_and_evicts_nothing() -> None:
    world = World(options={"limits": {"small": Limits(quota=4096)}})
    small, mine = world.session("small"), one(world, "small", 2048)
    world.publish(small, mine, chain("a", 2))
    large = one(world, "small", 8192)
    got = world.store.reserve(small, large.id, b"", chain("b", 1)[0])
    assert got.outcomes.tolist() == [[Outcome.BUSY]]
    assert "tenant 'small' holds 4096 of 4096" in got.text
    assert world.hits(small, mine, chain("a", 2)) == 2
