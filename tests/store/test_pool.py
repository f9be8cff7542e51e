"""How a pool is cut and grows, and what happens when there is not enough memory."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.proto.errors import ConfigError
from kvpool.store.growth import Growth
from kvpool.store.memory import AvailableMemory
from kvpool.store.pool import PAGE, REGION_BYTES_MAX, region_bytes_for
from kvpool.store.service import Domain, Health, new_domain

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    "capacity", [4 * PAGE, MIB, MIB + 1, 300 * MIB, GIB, 10 * GIB, 100 * GIB, 1000 * GIB]
)
def test_regions_use_the_capacity_but_for_a_page_each(capacity: int) -> None:
    region = region_bytes_for(capacity)
    count = capacity // region
    assert region % PAGE == 0 and region <= REGION_BYTES_MAX
    assert 0 <= capacity - count * region < count * PAGE


def test_a_capacity_below_four_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="minimum"):
        region_bytes_for(4 * PAGE - 1)


def domain_of(capacity: int) -> Domain:
    return new_domain("local", capacity, clock=time.monotonic, entropy=os.urandom)


def growth_of(
    domain: Domain, health: Health, available: Callable[[], int], *, populate: bool = True
) -> Growth:
    def memory(headroom: int) -> AvailableMemory:
        return AvailableMemory(available() - headroom, "the test")

    return Growth([domain], health, available=memory, headroom=10 * MIB, populate=populate)


def shared_memory_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))


def test_a_pool_is_ready_after_its_first_region_and_then_grows() -> None:
    domain, health = domain_of(GIB), Health()
    growth = growth_of(domain, health, lambda: 100 * GIB, populate=False)

    async def grow() -> None:
        await growth.first_regions()
        assert domain.store.capacity_bytes == 256 * MIB
        assert domain.pool.room == 768 * MIB
        await growth.rest()

    asyncio.run(grow())
    assert domain.store.capacity_bytes == GIB and not domain.pool.room
    assert not health.reasons
    domain.pool.close()


def test_the_pages_of_a_populated_pool_are_there_at_once() -> None:
    domain = domain_of(32 * MIB)
    before = shared_memory_bytes()
    asyncio.run(growth_of(domain, Health(), lambda: GIB).first_regions())
    assert shared_memory_bytes() - before >= 32 * MIB
    domain.pool.close()


def test_a_first_region_that_does_not_fit_is_refused_with_figures() -> None:
    domain = domain_of(32 * MIB)
    growth = growth_of(domain, Health(), lambda: 41 * MIB)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(growth.first_regions())
    for figure in (32 * MIB, 31 * MIB, 10 * MIB):
        assert str(figure) in str(caught.value)
    assert "--capacity" in str(caught.value)
    assert not domain.pool.memory.regions and not domain.store.regions


def test_memory_that_vanishes_amid_a_region_gives_that_region_back() -> None:
    domain = domain_of(192 * MIB)
    looks = iter([GIB, GIB, 20 * MIB])
    before = shared_memory_bytes()
    with pytest.raises(ConfigError, match="67108864 more bytes"):
        asyncio.run(growth_of(domain, Health(), lambda: next(looks)).first_regions())
    assert not domain.pool.memory.regions
    assert shared_memory_bytes() - before < MIB


def test_a_pool_that_cannot_grow_goes_on_with_what_it_has_and_says_so() -> None:
    domain, health = domain_of(512 * MIB), Health()
    looks = iter([GIB, 100 * MIB])
    growth = growth_of(domain, health, lambda: next(looks), populate=False)

    async def grow() -> None:
        await growth.first_regions()
        await growth.rest()

    asyncio.run(grow())
    assert domain.store.capacity_bytes == 256 * MIB
    [reason] = health.reasons.values()
    assert f"stays at {256 * MIB} of {512 * MIB} bytes" in reason
    domain.pool.close()
