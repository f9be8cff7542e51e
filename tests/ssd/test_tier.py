"""What the tier promises while it works, is full, is slow, fails, hangs and comes back."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.store.ssd.condition import HANG_S, RETRY_S
from kvpool.store.ssd.disk import COMMIT_MAX
from kvpool.store.ssd.entries import Entry
from kvpool.store.ssd.lanes import Lane
from kvpool.store.ssd.tier import FREE_BYTES_MIN, LOOK_S, Draft, Piece, Read, Refusal
from kvpool.store.ssd.verify import forms_of
from tests.ssd.samples import (
    BLOCK,
    FORMS,
    SEGMENT,
    Shelf,
    extent_of,
    key_of,
    namespace,
)

SLOTS = SEGMENT // (3 * BLOCK)
"""Chunks in one segment: an extent has 192 + 2 x 4100 bytes, in whole blocks three."""


def later(shelf: Shelf, seconds: float) -> None:
    """Time passes, and what the tier does then is done."""
    shelf.clock.now += seconds
    shelf.tier.tick()
    shelf.lanes.run()


def test_what_was_stored_is_read_back_verified() -> None:
    shelf = Shelf()
    entry = shelf.store(key_of("a"), 3)
    assert entry.extents[0].generation == 3
    verdict, why, content = shelf.read(entry)
    assert (verdict, why) == (Read.OK, "")
    assert content == extent_of(key_of("a"), 3).tobytes()
    counters = shelf.tier.counters
    assert (counters.written_chunks, counters.read_chunks) == (1, 1)
    assert counters.written_bytes == counters.read_bytes == FORMS[0].nbytes
    assert counters.device_bytes == 3 * BLOCK


def test_a_chunk_is_announced_after_sync_and_commit_and_not_before() -> None:
    shelf = Shelf()
    shelf.tier.write(shelf.draft(key_of("a"), 1))
    while not shelf.announced:
        assert key_of("a") not in shelf.catalogue.stored
        assert shelf.lanes.step()
    assert not shelf.disk.pending and key_of("a") in shelf.catalogue.stored


def test_chunks_that_wait_for_a_commit_share_the_next_one() -> None:
    shelf = Shelf()
    for name in range(10):
        shelf.tier.write(shelf.draft(key_of(name), 1))
    shelf.lanes.run()
    assert len(shelf.announced) == 10
    assert shelf.tier.counters.commits < 10


def written_at_once(count: int) -> tuple[Shelf, list[Draft]]:
    """So many chunks wait for the next commit together."""
    shelf = Shelf(segments=10)
    shelf.tier.flush()  # the namespace is being committed
    drafts = [shelf.draft(key_of(name), 1) for name in range(count)]
    for draft in drafts:
        assert shelf.tier.write(draft) is None
    for item in [item for item in shelf.lanes.waiting if item[0] == Lane.WRITE]:
        shelf.lanes.waiting.remove(item)
        item[2](item[1]())
    return shelf, drafts


def test_a_large_commit_is_announced_chunk_by_chunk() -> None:
    shelf, _ = written_at_once(3)
    announced: list[int] = []
    while shelf.lanes.step():
        announced.append(len(shelf.announced))
    assert [*dict.fromkeys(announced)] == [0, 1, 2, 3]
    assert shelf.tier.idle and not shelf.tier.writing_bytes


def test_a_chunk_that_is_cancelled_before_it_is_announced_leaves_nothing() -> None:
    shelf, drafts = written_at_once(2)
    while not shelf.announced:
        shelf.lanes.step()
    assert not shelf.tier.idle
    shelf.tier.cancel(drafts[1])
    shelf.lanes.run()
    assert set(shelf.catalogue.stored) == set(shelf.announced) == {key_of(0)}


def test_an_extent_is_free_only_after_its_deletion_is_committed() -> None:
    shelf = Shelf(segments=1)
    for name in range(SLOTS):
        shelf.store(key_of(name))
    shelf.delete(key_of(0))
    assert shelf.tier.write(shelf.draft(key_of("new"), 1)) is Refusal.NO_ROOM
    shelf.lanes.run()
    assert key_of(0) not in shelf.catalogue.stored
    assert shelf.tier.write(shelf.draft(key_of("new"), 1)) is None
    shelf.lanes.run()


def test_more_deletions_than_one_commit_takes_all_happen() -> None:
    shelf = Shelf(segments=60)
    names = [key_of(name) for name in range(COMMIT_MAX + 20)]
    for key in names:
        assert shelf.tier.write(shelf.draft(key, 1)) is None
        shelf.lanes.run()
    for key in names:
        entry = shelf.announced.pop(key)
        shelf.tier.delete(key)
        shelf.tier.release(entry.extents)
    shelf.tier.flush()
    shelf.lanes.run()
    assert not shelf.catalogue.stored and shelf.space.statistics().used_bytes == 0


def test_a_cancelled_chunk_leaves_nothing_whenever_it_is_cancelled() -> None:
    for steps in range(5):
        shelf = Shelf()
        draft = shelf.draft(key_of("a"), 1)
        shelf.tier.write(draft)
        for _ in range(steps):
            shelf.lanes.step()
        if not shelf.announced:
            shelf.tier.cancel(draft)
            shelf.lanes.run()
            assert not shelf.announced and not shelf.catalogue.stored
            assert shelf.space.statistics().used_bytes == 0
            assert shelf.tier.writing_bytes == 0


def test_parts_that_come_later_join_the_entry() -> None:
    space = namespace(4100, 100, model="two parts")
    digest = space.digest("default")
    forms = forms_of(space, digest)
    key, shelf = key_of("a"), Shelf()
    announced: list[Any] = []
    extents = [extent_of(key, 1, form) for form in forms]
    first = Draft(key, 1, b"", [Piece(1, 1, extents[1], 2)], announced.append)
    assert shelf.tier.write(first) is None
    shelf.lanes.run()
    kept = announced[0].extents
    both = Draft(key, 1, b"", [Piece(0, 1, extents[0], 2)], announced.append, kept=kept)
    assert shelf.tier.write(both) is None
    shelf.lanes.run()
    assert [extent.part for extent in announced[1].extents] == [0, 1]
    assert announced[1].extents[1] == kept[0]
    assert Entry.unpack(key, shelf.catalogue.stored[key]) == announced[1]


def test_an_entry_whose_later_part_fails_keeps_the_first_one() -> None:
    shelf, key = Shelf(), key_of("a")
    announced: list[Any] = []
    entry = shelf.store(key)
    later_part = Draft(
        key, 1, b"", [Piece(1, 1, extent_of(key, 1), 2)], announced.append, kept=entry.extents
    )
    shelf.disk.faults.committing = OSError(5, "Input/output error")
    shelf.disk.faults.committed_anyway = True
    shelf.tier.write(later_part)
    shelf.lanes.run()
    shelf.disk.faults.committing = None
    later(shelf, RETRY_S)
    assert announced == [None]
    assert Entry.unpack(key, shelf.catalogue.stored[key]) == entry


def test_chunks_without_sums_are_not_written_and_counted() -> None:
    shelf = Shelf()
    shelf.tier.write(shelf.draft(key_of("a"), 1, summed=False))
    shelf.lanes.run()
    assert not shelf.announced and shelf.tier.counters.unsummed_chunks == 1
    assert shelf.space.statistics().used_bytes == 0


# ---- bounds


def test_a_slow_device_meets_a_bounded_queue_and_drops_are_counted() -> None:
    shelf = Shelf(queue_bytes=3 * FORMS[0].nbytes)
    taken = [shelf.tier.write(shelf.draft(key_of(name), 1)) for name in range(5)]
    assert taken == [None, None, None, Refusal.QUEUE_FULL, Refusal.QUEUE_FULL]
    assert shelf.tier.counters.refused_writes == 2
    shelf.lanes.run()
    assert len(shelf.announced) == 3
    assert shelf.tier.write(shelf.draft(key_of("later"), 1)) is None


def test_space_that_others_took_stops_writes_until_it_is_back() -> None:
    shelf = Shelf()
    shelf.disk.faults.free_bytes = FREE_BYTES_MIN - 1
    later(shelf, LOOK_S)
    assert "bytes left" in shelf.tier.full
    assert shelf.tier.write(shelf.draft(key_of("a"), 1)) is Refusal.DOWN
    shelf.disk.faults.free_bytes = FREE_BYTES_MIN
    later(shelf, LOOK_S)
    assert not shelf.tier.full
    shelf.store(key_of("a"))


def test_a_full_catalogue_drops_what_is_new_and_still_deletes() -> None:
    shelf = Shelf()
    shelf.store(key_of("a"))
    shelf.disk.faults.entries_max = 0
    shelf.tier.write(shelf.draft(key_of("b"), 1))
    shelf.delete(key_of("a"))
    shelf.lanes.run()
    assert not shelf.announced and not shelf.catalogue.stored
    assert not shelf.tier.down
    assert shelf.space.statistics().used_bytes == 0


# ---- a device that fails


@pytest.mark.parametrize("where", ["writing", "syncing", "committing"])
def test_an_error_marks_the_tier_down_and_it_comes_up_by_itself(where: str) -> None:
    shelf = Shelf()
    kept = shelf.store(key_of("kept"))
    setattr(shelf.disk.faults, where, OSError(30, "Read-only file system"))
    shelf.tier.write(shelf.draft(key_of("a"), 1))
    shelf.lanes.run()
    assert "Read-only file system" in shelf.tier.down
    assert shelf.tier.write(shelf.draft(key_of("b"), 1)) is Refusal.DOWN
    assert shelf.tier.writing_bytes == 0
    setattr(shelf.disk.faults, where, None)
    later(shelf, RETRY_S / 2)
    assert shelf.tier.down, "it is not tried at once"
    later(shelf, RETRY_S)
    assert not shelf.tier.down
    assert shelf.read(kept)[0] is Read.OK
    shelf.store(key_of("a"), 2)
    assert shelf.tier.condition.downs == 1


def test_while_the_device_stays_bad_it_is_tried_ever_less_often() -> None:
    shelf = Shelf()
    shelf.disk.faults.writing = OSError(5, "Input/output error")
    shelf.tier.write(shelf.draft(key_of("a"), 1))
    shelf.lanes.run()
    tries = 0
    for _ in range(120):
        shelf.clock.now += 1
        shelf.tier.tick()
        tries += len(shelf.lanes.waiting)
        shelf.lanes.run()
    assert 5 <= tries <= 9  # after 1, 2, 4, 8, 16, 30, 30 … seconds


def test_deletions_wait_for_a_device_that_is_down_and_then_happen() -> None:
    shelf = Shelf()
    shelf.store(key_of("a"))
    shelf.disk.faults.writing = OSError(5, "Input/output error")
    shelf.tier.write(shelf.draft(key_of("b"), 1))
    shelf.lanes.run()
    shelf.delete(key_of("a"))
    assert shelf.catalogue.stored
    shelf.disk.faults.writing = None
    later(shelf, RETRY_S)
    assert not shelf.catalogue.stored and shelf.space.statistics().used_bytes == 0


def test_a_device_that_hangs_is_marked_down_and_comes_up_when_it_answers() -> None:
    shelf = Shelf()
    shelf.tier.write(shelf.draft(key_of("a"), 1))
    shelf.clock.now += HANG_S + 1
    shelf.tier.tick()
    assert "no answer" in shelf.tier.down
    assert shelf.tier.write(shelf.draft(key_of("b"), 1)) is Refusal.DOWN
    shelf.lanes.run()
    later(shelf, RETRY_S)
    later(shelf, RETRY_S)
    assert not shelf.tier.down
    shelf.store(key_of("b"))


# ---- damage


@pytest.mark.parametrize("offset", [0, 50, 110, 130, 200, 4200, 8143])
def test_one_flipped_bit_anywhere_is_damage_and_counted(offset: int) -> None:
    shelf = Shelf()
    entry = shelf.store(key_of("a"))
    shelf.disk.flip(entry.extents[0].address + offset)
    verdict, why, _ = shelf.read(entry)
    assert verdict is Read.DAMAGED and why
    assert shelf.tier.counters.corrupt_chunks == 1
    assert not shelf.tier.down, "damage is not a failing device"


def test_the_bytes_of_another_chunk_or_of_another_write_never_pass() -> None:
    shelf = Shelf()
    mine, other = shelf.store(key_of("a")), shelf.store(key_of("b"))
    place = mine.extents[0].address
    for strange in (extent_of(key_of("b"), 1), extent_of(key_of("a"), 2)):
        shelf.disk.durable[place : place + strange.size] = strange
        assert shelf.read(mine)[0] is Read.DAMAGED
    assert shelf.read(other)[0] is Read.OK


def test_what_is_quarantined_is_never_written_again() -> None:
    shelf = Shelf(segments=1)
    entries = [shelf.store(key_of(name)) for name in range(SLOTS)]
    shelf.tier.delete(entries[0].key)
    shelf.tier.quarantine(entries[0].extents)
    shelf.tier.flush()
    shelf.lanes.run()
    assert entries[0].key not in shelf.catalogue.stored
    assert shelf.tier.write(shelf.draft(key_of("new"), 1)) is Refusal.NO_ROOM
    assert shelf.space.quarantined_bytes == 3 * BLOCK


def test_a_place_that_cannot_be_read_twice_is_damaged_a_moment_is_not() -> None:
    shelf = Shelf()
    entry = shelf.store(key_of("a"))
    for wanted in (Read.FAILED, Read.DAMAGED):
        shelf.disk.faults.reading = OSError(5, "Input/output error")
        assert shelf.read(entry)[0] is wanted
        assert "Input/output error" in shelf.tier.down
        shelf.disk.faults.reading = None
        later(shelf, 60)
        assert not shelf.tier.down
    assert shelf.tier.counters.read_errors == 2


# ---- estimates


def test_the_estimate_follows_the_device_and_the_queue() -> None:
    shelf = Shelf()
    speed = shelf.tier.speed
    for at in range(200):  # two reads side by side, each 1 MiB, one ends every 10 ms
        speed.learn(1 << 20, at * 0.01 - 0.01, at * 0.01 + 0.01)
    assert speed.bytes_s == pytest.approx((1 << 20) / 0.01, rel=0.1)
    assert shelf.tier.estimate_s(1 << 20) == pytest.approx(0.01, rel=0.1)
    shelf.tier.reading_bytes = 1 << 20
    assert shelf.tier.estimate_s(1 << 20) == pytest.approx(0.02, rel=0.1)
