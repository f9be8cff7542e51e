"""Leases: against a list of who holds what until when."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.store.leases import Lease, Leases

SESSIONS = (1, 2, 3)
TENANTS = ("red", "blue")


class Names:
    """As many bytes as asked for, all names of 16 bytes in them different."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, nbytes: int) -> bytes:
        first, self.given = self.given, self.given + nbytes // 16
        return b"".join(at.to_bytes(16, "big") for at in range(first, self.given))


def leases() -> Leases:
    return Leases(Names())


def grant(book: Leases, session: int = 1, tenant: str = "red", deadline: float = 30.0) -> Lease:
    return book.grant(session, tenant, 1, np.arange(3, dtype=np.intp), deadline, 300)


@dataclass(eq=False)
class Held:
    """What the model knows of a lease."""

    lease: Lease
    deadline: float
    tenant: str
    holders: Counter[int] = field(default_factory=Counter)
    expired: bool = False


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = leases()
        self.live: list[Held] = []
        self.dead: list[Lease] = []
        self.granted = 0
        self.now = 0.0

    def pick(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.live), "lease")

    def settle(self, held: Held, ended: bool | None) -> None:
        assert ended is (not held.holders)
        if ended:
            self.live.remove(held)
            self.dead.append(held.lease)

    @rule(
        session=st.sampled_from(SESSIONS), tenant=st.sampled_from(TENANTS), ttl=st.integers(1, 20)
    )
    def grant(self, session: int, tenant: str, ttl: int) -> None:
        lease = grant(self.book, session, tenant, self.now + ttl)
        self.granted += 1
        self.live.append(Held(lease, self.now + ttl, tenant, Counter([session])))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), session=st.sampled_from(SESSIONS))
    def adopt(self, data: st.DataObject, session: int) -> None:
        held = self.pick(data)
        self.book.adopt(session, held.lease)
        held.holders[session] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ttl=st.integers(-20, 40))
    def renew(self, data: st.DataObject, ttl: int) -> None:
        held = self.pick(data)
        if not held.expired:
            self.book.renew(held.lease, self.now + ttl)
            held.deadline = max(held.deadline, self.now + ttl)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), session=st.sampled_from(SESSIONS))
    def release(self, data: st.DataObject, session: int) -> None:
        held = self.pick(data)
        ended = self.book.release(session, held.lease)
        if not held.holders[session]:
            assert ended is None
            return
        held.holders[session] -= 1
        held.holders += Counter()
        self.settle(held, ended)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        held = self.pick(data)
        session = data.draw(st.sampled_from(sorted(held.holders)), "session")
        ended = self.book.drop(session, held.lease)
        del held.holders[session]
        self.settle(held, ended)

    @rule(session=st.sampled_from(SESSIONS))
    def close_session(self, session: int) -> None:
        ended = self.book.close_session(session)
        for held in self.live[:]:
            if session in held.holders:
                del held.holders[session]
                self.settle(held, held.lease in ended)
            else:
                assert held.lease not in ended

    @rule(seconds=st.integers(0, 15))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        due = [held for held in self.live if not held.expired and held.deadline <= self.now]
        assert set(self.book.expire(self.now)) == {held.lease for held in due}
        for held in due:
            held.expired = True

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        self.book.check_integrity()
        assert len(self.book) == len(self.live)
        assert (self.book.opened, self.book.ended) == (self.granted, len(self.dead))
        for held in self.live:
            assert held.lease.holders == held.holders
            assert held.lease.expired is held.expired
            for tenant in TENANTS:
                same = held.lease if tenant == held.tenant else None
                assert self.book.get(held.lease.id, tenant) is same
        for lease in self.dead:
            assert all(self.book.get(lease.id, tenant) is None for tenant in TENANTS)
            assert all(self.book.release(session, lease) is None for session in SESSIONS)
        for session in SESSIONS:
            mine = [held.lease for held in self.live if session in held.holders]
            assert sorted(x.id for x in self.book.held_by(session)) == sorted(x.id for x in mine)

    def teardown(self) -> None:
        for session in SESSIONS:
            self.book.close_session(session)
        assert len(self.book) == 0
        assert self.book.opened == self.book.ended


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_second_release_takes_nothing_from_the_other_holders() -> None:
    book = leases()
    lease = grant(book, session=1)
    book.adopt(2, lease)
    assert book.release(1, lease) is False
    assert book.release(1, lease) is None
    assert lease.holders == {2: 1}
    assert book.release(2, lease) is True
    assert book.release(2, lease) is None
    assert (len(book), book.opened, book.ended) == (0, 1, 1)


def test_a_session_that_holds_a_lease_twice_releases_it_twice() -> None:
    book = leases()
    lease = grant(book, session=1)
    book.adopt(1, lease)
    assert [book.release(1, lease), book.release(1, lease)] == [False, True]


def test_another_tenant_cannot_see_a_lease_whose_name_it_knows() -> None:
    book = leases()
    lease = grant(book, tenant="red")
    assert book.get(lease.id, "blue") is None
    assert book.get(lease.id, "red") is lease


def test_a_lease_expires_at_its_deadline_and_not_before() -> None:
    book = leases()
    lease = grant(book, deadline=30.0)
    assert book.expire(29.999) == []
    assert book.expire(30.0) == [lease]
    assert book.expire(1e9) == [], "once"
    assert len(book) == 1, "expiry ends a right, not the holding"


def test_a_renewal_moves_the_deadline_out_and_never_in() -> None:
    book = leases()
    lease = grant(book, deadline=30.0)
    book.renew(lease, 60.0)
    book.renew(lease, 10.0)
    assert book.expire(59.0) == []
    assert book.expire(60.0) == [lease]


def test_what_was_released_leaves_no_trail_behind() -> None:
    book = leases()
    kept = grant(book, deadline=1e6)
    for _ in range(10_000):
        book.release(1, grant(book, deadline=1e6))
    for round_ in range(10_000):
        book.renew(kept, 1e6 + round_)
    book.expire(0.0)
    assert len(book._deadlines) <= 66
    book.check_integrity()
    assert book.expire(2e6) == [kept]
