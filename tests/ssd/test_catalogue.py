"""Entries in bytes and in columns, and the two catalogues side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto.errors import ConfigError
from kvpool.store.ssd.disk import COMMIT_MAX, Catalogue, CatalogueFullError
from kvpool.store.ssd.entries import Entry, Extent, SpaceRecord
from kvpool.store.ssd.folder import CATALOGUE, Folder
from kvpool.store.ssd.listing import ADDRESS, SUM, read_listing
from kvpool.store.ssd.lmdb_catalogue import LmdbCatalogue
from kvpool.store.ssd.simulated import SimulatedCatalogue
from tests.ssd.samples import RECORD, key_of

U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32)
EXTENTS = st.dictionaries(st.integers(0, 63), st.tuples(U64, U64, U64, U64), min_size=1, max_size=4)
ENTRIES = st.builds(
    lambda key, space, parent, extents: Entry(
        key, space, parent, tuple(Extent(part, *extents[part]) for part in sorted(extents))
    ),
    KEYS,
    st.integers(0, 2**32 - 1),
    st.just(b"") | KEYS,
    EXTENTS,
)


def entry(name: object, address: int = 0, parent: bytes = b"") -> Entry:
    return Entry(key_of(name), 1, parent, (Extent(0, address, 4096, 1, 7),))


@given(ENTRIES)
def test_an_entry_survives_its_bytes(one: Entry) -> None:
    assert Entry.unpack(one.key, one.pack()) == one


def test_the_bytes_of_an_entry_are_fixed() -> None:
    one = Entry(b"k" * 32, 5, b"p" * 32, (Extent(1, 4096, 100, 9, 0x0102030405060708),))
    assert one.pack() == (
        b"\x05\0\0\0\0\0\0\0" + b"p" * 32 + b"\x02" + bytes(7)
        + b"\0\x10\0\0\0\0\0\0" + b"d" + bytes(7) + b"\x09" + bytes(7)
        + b"\x08\x07\x06\x05\x04\x03\x02\x01"
    )  # fmt: skip


@given(
    st.lists(ENTRIES, max_size=20, unique_by=lambda one: one.key),
    st.binary(max_size=200),
    st.integers(1, 30),
)
def test_a_listing_holds_the_same_as_its_entries_and_names_what_is_none(
    entries: list[Entry], rubbish: bytes, block: int
) -> None:
    pairs = [(one.key, one.pack()) for one in entries]
    strange = key_of("rubbish")
    try:
        Entry.unpack(strange, rubbish)
        wanted = []
    except ValueError:
        wanted = [strange]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool.store.ssd.listing.BLOCK", block)
        listing, damaged = read_listing([*pairs, (strange, rubbish)], len(pairs) + 1)
    assert damaged == wanted and len(listing) == len(entries) + 1 - len(damaged)
    by_key = {bytes(key): at for at, key in enumerate(listing.keys)}
    for one in entries:
        at = by_key[one.key]
        assert int(listing.spaces[at]) == one.space
        assert bool(listing.roots[at]) is (one.parent == b"")
        assert not one.parent or bytes(listing.parents[at]) == one.parent
        stored = [part for part in range(len(listing.extents)) if listing.has(part)[at]]
        assert stored == [extent.part for extent in one.extents]
        for extent in one.extents:
            row = listing.extents[extent.part][at]
            assert (int(row[ADDRESS]), int(row[SUM])) == (extent.address, extent.sum)


@given(st.text(min_size=1).filter(lambda text: text.isprintable()), KEYS, st.binary(min_size=1))
def test_a_namespace_survives_its_bytes(tenant: str, digest: bytes, record: bytes) -> None:
    one = SpaceRecord(3, tenant, digest, record)
    assert SpaceRecord.unpack(3, one.pack()) == one


@pytest.fixture(params=["simulated", "lmdb"])
def catalogue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalogue]:
    if request.param == "simulated":
        yield SimulatedCatalogue()
        return
    folder = Folder(str(tmp_path / "tier"))
    made = LmdbCatalogue(folder, 16 << 20)
    yield made
    made.close()
    folder.close()


def keys_in(catalogue: Catalogue) -> set[bytes]:
    return {key for key, _ in catalogue.pairs()}


def test_what_was_committed_is_listed_and_what_was_deleted_is_not(catalogue: Catalogue) -> None:
    catalogue.commit([entry(1), entry(2, 4096)], [])
    catalogue.commit([entry(3)], [key_of(1), key_of("never")])
    assert keys_in(catalogue) == {key_of(2), key_of(3)}
    assert Entry.unpack(key_of(2), dict(catalogue.pairs())[key_of(2)]) == entry(2, 4096)


def test_a_key_that_is_deleted_and_put_in_one_commit_is_there(catalogue: Catalogue) -> None:
    catalogue.commit([entry(1)], [])
    catalogue.commit([entry(1, 8192)], [key_of(1)])
    assert dict(catalogue.pairs())[key_of(1)] == entry(1, 8192).pack()


def test_namespaces_are_kept_with_their_numbers(catalogue: Catalogue) -> None:
    catalogue.add_space(RECORD)
    catalogue.add_space(RECORD)
    assert catalogue.spaces() == [RECORD]


def test_a_full_catalogue_refuses_puts_and_can_always_delete(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    catalogue = LmdbCatalogue(folder, 6 << 20)
    names = iter(range(1 << 20))
    stored: list[Entry] = []
    with pytest.raises(CatalogueFullError):
        while True:
            batch = [entry(next(names)) for _ in range(COMMIT_MAX)]
            catalogue.commit(batch, [])
            stored += batch
    assert keys_in(catalogue) == {one.key for one in stored}, "a refused commit changes nothing"
    for _ in range(3):  # delete all of it, fill it again: no page is lost
        for at in range(0, len(stored), COMMIT_MAX):
            catalogue.commit([], [one.key for one in stored[at : at + COMMIT_MAX]])
        assert keys_in(catalogue) == set()
        for at in range(0, len(stored), COMMIT_MAX):
            catalogue.commit(stored[at : at + COMMIT_MAX], [])
    figures = catalogue.figures()
    assert figures["entries"] == len(stored)
    assert figures["used_bytes"] <= figures["file_bytes"] <= figures["map_bytes"] == 6 << 20
    catalogue.close()
    folder.close()


def test_a_catalogue_is_there_again_after_it_was_closed(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    catalogue = LmdbCatalogue(folder, 16 << 20)
    catalogue.add_space(RECORD)
    catalogue.commit([entry(1)], [])
    catalogue.close()
    catalogue.close()
    with pytest.raises(OSError, match="closed"):
        catalogue.commit([entry(2)], [])
    again = LmdbCatalogue(folder, 8 << 20)
    assert keys_in(again) == {key_of(1)} and again.spaces() == [RECORD]
    assert os.stat(folder.path / CATALOGUE).st_mode & 0o777 == 0o600
    again.close()
    folder.close()


def test_a_file_that_is_no_catalogue_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    (folder.path / CATALOGUE).write_bytes(b"rubbish" * 4096)
    with pytest.raises(ConfigError, match="remove the folder to start empty"):
        LmdbCatalogue(folder, 16 << 20)
    folder.close()


def test_without_lmdb_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    folder = Folder(str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match=r"pip install 'kvpool\[ssd\]'"):
        LmdbCatalogue(folder, 16 << 20)
    folder.close()
