"""The cheapest transport that works is chosen, and every other one has a reason."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvpool.proto.errors import ConfigError, InvalidError, UnreachableError
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
    Transport,
)
from kvpool.transfer.copying import as_bytes, copy
from kvpool.transfer.inproc import Faults, InprocTransport
from kvpool.transfer.select import (
    PROBE_BLOCK,
    Candidate,
    Explanation,
    Needs,
    Selector,
    fill_probe,
    probe_is_whole,
)
from kvpool.transfer.tcp import TcpTransport
from kvpool.transfer.transfers import Finished, Pending

PROBE = 4 * PROBE_BLOCK
HERE = Needs(Locality.SAME_HOST)

ABLE = Capabilities(
    kinds=frozenset({MemoryKind.DRAM}),
    localities=frozenset({Locality.SAME_HOST}),
    one_sided=True,
    writes=True,
    detects_peer_death=False,
    spins=False,
    alignment=1,
    max_batch=16,
)


class FakeTransport:
    """A transport and its only endpoint, with a cost and with ways to fail."""

    def __init__(
        self,
        name: str,
        seconds: float = 1.0,
        able: Capabilities = ABLE,
        dead: bool = False,
        status: Status = Status.OK,
        hangs: bool = False,
        flips: bool = False,
        forgets_writes: bool = False,
    ) -> None:
        self.name = name
        self.seconds = seconds
        self.able = able
        self.dead = dead
        self.status = status
        self.hangs = hangs
        self.flips = flips
        self.forgets_writes = forgets_writes
        self.memory = np.zeros(PROBE, np.uint8)
        fill_probe(self.memory)
        self.connected = 0
        self.state = EndpointState.OPEN
        self.calls: list[str] = []

    def capabilities(self) -> Capabilities:
        return self.able

    def register(self, buffer: Buffer) -> Region:
        raise NotImplementedError

    def deregister(self, region: Region) -> None:
        raise NotImplementedError

    def descriptor(self) -> bytes:
        return b""

    def connect(self, descriptor: bytes) -> "FakeTransport":
        if self.dead:
            raise UnreachableError("nobody answers")
        self.connected += 1
        self.state = EndpointState.OPEN
        return self

    def read(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        self.calls.append("read")
        if self.hangs:
            return Hanging()
        target = as_bytes(buffers[0], writable=True)
        copy(target, self.memory[: target.size])
        if self.flips:
            target[100] ^= 1
        return Finished([self.status])

    def write(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        self.calls.append("write")
        if not self.forgets_writes:
            source = as_bytes(buffers[0])
            copy(self.memory[: source.size], source)
        return Finished([self.status])

    def estimate(self, nbytes: int) -> Cost:
        return Cost(self.seconds, 0.0, "measured")

    def close(self) -> None:
        self.state = EndpointState.CLOSED


class Hanging(Pending):
    """Never done before it is cancelled, and does not wait."""

    def wait(self, timeout: float) -> bool:
        return self.done()

    def cancel(self) -> None:
        self.finish([Status.CANCELLED])


def select(
    *transports: FakeTransport, needs: Needs = HERE, override: str | None = None
) -> Selector:
    candidates = [Candidate(one, b"", Region(0, 1, PROBE)) for one in transports]
    return Selector(candidates, needs, override, probe_nbytes=PROBE, probe_deadline=1.0)


def test_the_cheapest_of_those_that_work_is_chosen() -> None:
    selector = select(FakeTransport("slow", 0.002), FakeTransport("fast", 0.001))
    assert selector.explain() == Explanation(
        "fast",
        {
            "slow": "works, but takes 2 ms where fast takes 1 ms",
            "fast": "cheapest: 1 ms",
        },
    )


def test_of_equals_the_first_is_chosen() -> None:
    assert select(FakeTransport("a"), FakeTransport("b")).explain().chosen == "a"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FakeTransport("x", dead=True), "nobody answers"),
        (FakeTransport("x", status=Status.STALE), "the probe's read failed: STALE"),
        (FakeTransport("x", hangs=True), "the probe's read failed: CANCELLED"),
        (FakeTransport("x", flips=True), "the probe arrived with wrong bytes"),
        (
            FakeTransport("x", able=replace(ABLE, localities=frozenset({Locality.REMOTE}))),
            "does not reach a peer in same_host",
        ),
        (
            FakeTransport("x", able=replace(ABLE, kinds=frozenset({MemoryKind.GPU}))),
            "does not move dram memory",
        ),
    ],
)
def test_what_does_not_work_is_passed_over_with_its_reason(
    broken: FakeTransport, reason: str
) -> None:
    selector = select(broken, FakeTransport("good"))
    assert selector.explain().chosen == "good"
    assert selector.explain().reasons["x"] == reason
    with pytest.raises(UnreachableError, match=f"x: {reason}"):
        select(broken)
    assert broken.state is EndpointState.CLOSED or not broken.connected


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FakeTransport("x", able=replace(ABLE, writes=False)), "cannot write"),
        (FakeTransport("x", forgets_writes=True), "the probe arrived with wrong bytes"),
    ],
)
def test_writes_are_probed_only_if_they_are_needed(broken: FakeTransport, reason: str) -> None:
    assert select(broken).explain().chosen == "x"
    assert "write" not in broken.calls
    selector = select(broken, FakeTransport("good"), needs=replace(HERE, writes=True))
    assert selector.explain().chosen == "good"
    assert selector.explain().reasons["x"] == reason


def test_an_override_is_taken_although_others_are_cheaper() -> None:
    fast, slow = FakeTransport("fast", 1), FakeTransport("slow", 2)
    selector = select(fast, slow, override="slow")
    assert selector.explain().chosen == "slow"
    assert selector.explain().reasons["fast"] == "not asked for: 'slow' is set explicitly"
    assert fast.connected == 0


def test_an_override_that_is_missing_is_named_and_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"'rdma' was asked for.*there are: good"):
        select(FakeTransport("good"), override="rdma")


def test_an_override_that_cannot_or_does_not_work_is_never_replaced() -> None:
    unfit = FakeTransport("x", able=replace(ABLE, kinds=frozenset()))
    with pytest.raises(ConfigError, match="'x' was asked for but: does not move dram"):
        select(unfit, FakeTransport("good"), override="x")
    with pytest.raises(UnreachableError, match="'x' was asked for but: nobody answers"):
        select(FakeTransport("x", dead=True), FakeTransport("good"), override="x")


def test_refresh_follows_the_measured_cost() -> None:
    first, second = FakeTransport("first", 1), FakeTransport("second", 2)
    selector = select(first, second)
    first.seconds = 3
    selector.refresh()
    assert selector.explain().chosen == "second"
    assert selector.endpoint is second
    assert (first.connected, second.connected) == (1, 1)


def test_refresh_drops_what_broke_and_takes_back_what_recovered() -> None:
    first, second = FakeTransport("first", 1), FakeTransport("second", 2)
    selector = select(first, second)
    first.dead, first.status = True, Status.UNREACHABLE
    selector.refresh()
    assert selector.explain().chosen == "second"
    first.dead, first.status = False, Status.OK
    selector.refresh()
    assert selector.explain().chosen == "first"
    assert first.connected == 2


def test_a_closed_selector_has_no_endpoint() -> None:
    fake = FakeTransport("x")
    selector = select(fake)
    selector.close()
    selector.close()
    assert fake.state is EndpointState.CLOSED
    with pytest.raises(UnreachableError):
        _ = selector.endpoint


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidError):
        select(FakeTransport("x"), FakeTransport("x"))
    with pytest.raises(InvalidError):
        Selector([], HERE, probe_nbytes=100)
    with pytest.raises(UnreachableError, match="no candidates"):
        Selector([], HERE)


def test_a_probe_region_that_is_too_short_is_a_reason() -> None:
    candidate = Candidate(FakeTransport("x"), b"", Region(0, 1, PROBE))
    with pytest.raises(UnreachableError, match="only 16384 bytes"):
        Selector([candidate], HERE, probe_nbytes=2 * PROBE)


def test_a_probe_shows_every_wrong_place_and_bit() -> None:
    buffer = np.zeros(PROBE, np.uint8)
    fill_probe(buffer, seed=5)
    assert probe_is_whole(buffer)
    assert probe_is_whole(buffer[:PROBE_BLOCK])
    assert not probe_is_whole(buffer[PROBE_BLOCK:])
    for byte in range(0, PROBE, 509):
        buffer[byte] ^= 4
        assert not probe_is_whole(buffer)
        buffer[byte] ^= 4
    with pytest.raises(InvalidError):
        fill_probe(bytearray(100))


def test_real_transports_are_probed_and_compared() -> None:
    near, far, bad = InprocTransport(), TcpTransport(), InprocTransport(Faults(corrupt=1.0))
    bad.name = "bad"
    memory = [np.zeros(1 << 20, np.uint8) for _ in range(3)]
    for one in memory:
        fill_probe(one)
    owners: list[Transport] = [near, far, bad]
    candidates = [
        Candidate(owner, owner.descriptor(), owner.register(one))
        for owner, one in zip(owners, memory, strict=True)
    ]
    selector = Selector(candidates, Needs(Locality.SAME_PROCESS, writes=True))
    explained = selector.explain()
    assert explained.chosen == "inproc"
    assert explained.reasons["tcp"].startswith("works, but takes")
    assert explained.reasons["bad"] == "the probe arrived with wrong bytes"
    selector.close()
    for owner in owners:
        owner.close()
