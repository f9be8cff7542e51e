"""Real files, catalogue and threads: what a kill -9 leaves, and what fsck says of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvpool.cli import cli
from kvpool.proto.errors import ConfigError
from kvpool.store.ssd.attached import Ssd
from kvpool.store.ssd.check import check_folder
from kvpool.store.ssd.entries import Entry
from kvpool.store.ssd.files import data_name
from kvpool.store.ssd.lanes import Lane, Threads
from kvpool.store.ssd.listing import claim, read_listing
from kvpool.store.ssd.opening import Opened, open_folder
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.speed import Speed
from kvpool.store.ssd.starting import attach, look
from kvpool.store.ssd.tier import Draft, Piece, Tier
from kvpool.store.store import Store, StoreOptions
from tests.ssd.samples import FORMS, RECORD, Clock, extent_of, key_of

CAPACITY = 4 << 20


class Shop:
    """A tier over real files; `settle` waits until all is done."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        self.opened: Opened = open_folder(str(path), capacity, 10_000)
        identity = self.opened.identity
        sizes = (identity.file_bytes, identity.segment_bytes, identity.block_bytes)
        self.space = Space(self.opened.count, *sizes)
        catalogue = self.opened.catalogue
        self.listing, damaged = read_listing(catalogue.pairs(), catalogue.figures()["entries"])
        assert not damaged and claim(self.listing, self.space).all()
        self.found = {k: Entry.unpack(k, v) for k, v in self.opened.catalogue.pairs()}
        self.woken = threading.Event()
        self.lanes = Threads(2, 2, self.woken.set)
        self.tier = Tier(
            self.opened.files,
            self.opened.catalogue,
            self.lanes,
            self.space,
            clock=Clock(),
            speed=Speed(1e9),
        )
        self.tier.add_space(RECORD)
        self.announced: dict[bytes, Entry] = {}

    def write(self, key: bytes, version: int) -> None:
        def done(entry: Entry | None) -> None:
            assert entry is not None
            self.announced[key] = entry

        piece = Piece(0, version, extent_of(key, version), FORMS[0].planes)
        assert self.tier.write(Draft(key, 1, b"", [piece], done)) is None

    def settle(self) -> None:
        self.tier.flush()
        while not self.tier.idle:
            assert self.woken.wait(30), "a thread does not answer"
            self.woken.clear()
            self.lanes.poll()

    def close(self) -> None:
        assert self.lanes.close(30)
        self.opened.close()


def test_what_was_announced_is_there_in_the_next_life(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "tier")
    for name in range(20):
        shop.write(key_of(name), name)
    shop.settle()
    announced = dict(shop.announced)
    assert len(announced) == 20
    shop.close()
    again = Shop(tmp_path / "tier")
    assert again.found == announced
    again.close()


def test_a_thread_that_fails_gives_its_error_to_the_owner() -> None:
    woken = threading.Event()
    lanes = Threads(1, 1, woken.set)
    got: list[Any] = []
    lanes.submit(Lane.READ, lambda: 1 // 0, got.append)
    assert woken.wait(30)
    assert lanes.poll() and isinstance(got[0], ZeroDivisionError)
    assert lanes.close(30)


def test_the_owner_takes_one_result_at_a_time_and_is_woken_for_the_rest() -> None:
    wakes = threading.Semaphore(0)
    got: list[Any] = []
    lanes = Threads(1, 1, wakes.release)
    for number in range(2):
        lanes.submit(Lane.READ, lambda number=number: number, got.append)  # type: ignore[misc]
        assert wakes.acquire(timeout=30)
    lanes.later(lambda: got.append("later"))
    assert wakes.acquire(timeout=30)
    for taken in ([0], [0, 1], [0, 1, "later"]):
        assert lanes.poll() and got == taken
        assert wakes.acquire(blocking=False) is (len(taken) < 3)
    assert not lanes.poll()
    assert lanes.close(30)


WRITER = """
import sys
from pathlib import Path
from tests.ssd.test_recovery import Shop, key_of
shop = Shop(Path(sys.argv[1]))
shown = set()
for name in range(10**9):
    if name >= 200:  # room is made as the store makes it
        old = shop.announced.pop(key_of(name - 200), None)
        if old is not None:
            print("deleted", name - 200, flush=True)
            shop.tier.delete(old.key)
            shop.tier.release(old.extents)
    shop.write(key_of(name), name)
    if name % 7 == 0:
        shop.settle()
        for at in range(max(0, name - 200), name + 1):
            if key_of(at) in shop.announced and at not in shown:
                shown.add(at)
                print("announced", at, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 40, 700])
def test_a_killed_writer_leaves_all_that_it_announced_and_nothing_damaged(
    tmp_path: Path, lines: int
) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "tier")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    said = [child.stdout.readline().split() for _ in range(lines)]
    child.send_signal(signal.SIGKILL)
    said += [line.split() for line in child.stdout if line.endswith("\n")]
    child.wait()
    child.stdout.close()
    deleted = {int(name) for word, name in said if word == "deleted"}
    promised = {int(name) for word, name in said if word == "announced"} - deleted
    assert promised
    shop = Shop(tmp_path / "tier")
    assert {key_of(name) for name in promised} <= shop.found.keys()
    shop.close()
    report = check_folder(str(tmp_path / "tier"))
    assert report.damaged == [] and report.chunks == len(shop.found)


# ---- fsck


def fsck(*arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(cli, ["fsck", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shop = Shop(tmp_path / "tier")
    for name in range(5):
        shop.write(key_of(name), 1)
    shop.settle()
    shop.close()
    return tmp_path / "tier"


def test_fsck_finds_nothing_where_nothing_is_wrong(folder: Path) -> None:
    code, report = fsck(str(folder), "--list")
    assert code == 0
    (found,) = (value for name, value in report.items() if name != "chunks")
    assert found["chunks"] == 5 and found["damaged"] == []
    assert found["bytes"] == 5 * FORMS[0].nbytes
    assert [space["model"] for space in found["namespaces"]] == ["test"]
    assert {one["key"] for one in report["chunks"]} == {key_of(n).hex() for n in range(5)}


def damage(folder: Path, kind: str) -> None:
    """One of the kinds of damage that files suffer at rest, to the first two chunks."""
    path = folder / data_name(0)
    raw = bytearray(path.read_bytes())
    extents = sorted(one.address for one in _extents(folder))
    first, second = extents[0], extents[1]
    size = second - first
    if kind == "flip":
        raw[first + 200] ^= 4
    elif kind == "zero page":
        raw[first + 4096 : first + 8192] = bytes(4096)
    elif kind == "swap":
        raw[first:second], raw[second : second + size] = (
            raw[second : second + size],
            raw[first:second],
        )
    elif kind == "short":
        del raw[first + 100 :]
    path.write_bytes(bytes(raw))


def _extents(folder: Path) -> list[Any]:
    shop = Shop(folder)
    found = [extent for entry in shop.found.values() for extent in entry.extents]
    shop.close()
    return found


@pytest.mark.parametrize(
    ("kind", "count"), [("flip", 1), ("zero page", 1), ("swap", 2), ("short", 5)]
)
def test_fsck_finds_damage_and_takes_it_out(folder: Path, kind: str, count: int) -> None:
    damage(folder, kind)
    code, report = fsck(str(folder))
    assert code == 1
    assert len(report[str(folder)]["damaged"]) == count
    assert all(one["wrong"] for one in report[str(folder)]["damaged"])
    code, report = fsck(str(folder), "--repair")
    assert code == 0 and report[str(folder)]["repaired"] == count
    code, report = fsck(str(folder))
    assert code == 0 and report[str(folder)]["chunks"] == 5 - count


def test_fsck_refuses_a_folder_in_use_and_one_that_is_no_tier(tmp_path: Path, folder: Path) -> None:
    shop = Shop(folder)
    with pytest.raises(ConfigError, match="in use by process"):
        check_folder(str(folder))
    shop.close()
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="holds no SSD tier"):
        check_folder(str(tmp_path / "empty"))
    assert os.listdir(tmp_path / "empty") == []


def test_entries_that_claim_one_place_are_both_found(folder: Path) -> None:
    shop = Shop(folder)
    one, other = sorted(shop.found.values())[:2]
    shop.opened.catalogue.commit([one._replace(extents=other.extents)], [])
    shop.close()
    listing, _ = read_listing([(e.key, e.pack()) for e in (one, one._replace(key=other.key))], 2)
    assert np.count_nonzero(claim(listing, Space(1, 1 << 20, 1 << 17, 4096))) <= 1
    code, report = fsck(str(folder))
    assert code == 1 and len(report[str(folder)]["damaged"]) >= 1


# ---- what cannot be taken over


def store_on(path: Path, capacity: int = CAPACITY) -> Ssd:
    """A store in memory over what is in a folder, whose threads are done."""
    found = look(str(path), capacity, 1000)
    store = Store(StoreOptions(1 << 20, 1000), clock=Clock(), entropy=os.urandom)
    store.add_region()
    woken = threading.Event()
    lanes = Threads(1, 1, woken.set)
    memory = np.zeros(1 << 20, np.uint8)
    ssd = attach(
        store,
        found,
        lanes,
        lambda address, nbytes: memory[address : address + nbytes],
        seed=1,
        write_through=False,
        clock=Clock(),
    )
    while not ssd.shelf.tier.idle:
        assert woken.wait(30)
        woken.clear()
        lanes.poll()
    assert lanes.close(30)
    found.opened.close()
    return ssd


def test_a_store_takes_over_what_is_there(folder: Path) -> None:
    ssd = store_on(folder)
    assert ssd.shelf.index.count == 5
    ssd.shelf.check_integrity()
    (known,) = ssd.shelf.known.values()
    assert known.digest == RECORD.digest and known.tenant == RECORD.tenant
    assert ssd.status()["direct"] in (True, False)


def test_entries_of_other_namespaces_sizes_or_places_are_given_up(folder: Path) -> None:
    shop = Shop(folder)
    entries = sorted(shop.found.values())
    (extent,) = entries[0].extents
    wrong = [
        entries[0]._replace(space=7),
        entries[1]._replace(extents=(extent._replace(nbytes=extent.nbytes - 1),)),
        entries[2]._replace(extents=(extent._replace(address=1 << 40),)),
    ]
    shop.opened.catalogue.commit(wrong, [])
    strange = RECORD.number + 1
    shop.opened.catalogue.add_space(replace(RECORD, number=strange, digest=bytes(32)))
    shop.close()
    ssd = store_on(folder)
    assert ssd.shelf.index.count == 2
    ssd.shelf.check_integrity()
    assert store_on(folder).shelf.index.count == 2, "and they are gone from the catalogue"
    again = Shop(folder)
    assert again.found.keys() == {entries[3].key, entries[4].key}
    again.close()


def test_a_tier_that_became_smaller_keeps_what_still_fits(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    Shop(path, 1 << 20).close()
    shop = Shop(path, 3 << 20)
    for name in range(180):
        shop.write(key_of(name), 1)
        shop.settle()
    inside = {k for k, e in shop.announced.items() if e.extents[0].address < 1 << 20}
    assert 0 < len(inside) < 180
    shop.close()
    ssd = store_on(path, 1 << 20)
    rows = ssd.shelf.index.linked_rows().tolist()
    assert {ssd.shelf.index.key_bytes(row) for row in rows} == inside
