"""A whole index at once is the same as row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.store.index import ORPHAN, ROOT, Index
from tests.ssd.samples import key_of


@given(st.lists(st.integers(-1, 30), max_size=40), st.integers(0, 5), st.randoms())
def test_rows_that_are_loaded_are_linked_as_if_they_had_been_inserted(
    above: list[int], missing: int, dice: object
) -> None:
    """`above[i]`: the row above row i (-1: none), always an earlier one."""
    parents = [min(parent, i - 1) for i, parent in enumerate(above)]
    gone = set(range(missing)) if len(above) > missing else set()
    order = [i for i in range(len(parents)) if i not in gone]
    dice.shuffle(order)  # type: ignore[attr-defined]
    index = Index(64, 7)
    keys = np.frombuffer(b"".join(key_of(i) for i in order), np.uint8).reshape(-1, 32)
    up = np.frombuffer(b"".join(key_of(parents[i]) for i in order), np.uint8).reshape(-1, 32)
    roots = np.array([parents[i] < 0 for i in order], np.bool_)
    loaded = index.load(np.full(len(order), 3, np.int32), keys, up, roots)
    index.check_integrity()
    assert sorted(loaded.tolist()) == list(range(len(order)))
    place = {int(row): at for at, row in enumerate(loaded)}
    row_of = {i: row for row, i in enumerate(order)}
    for i in order:
        row, parent = row_of[i], parents[i]
        assert index.find_one(3, key_of(i)) == row
        wanted = ROOT if parent < 0 else row_of.get(parent, ORPHAN)
        assert index.parent_at[row] == wanted
        assert wanted < 0 or place[wanted] < place[row], "parents first"
    new = index.insert(3, key_of("new"), ROOT)  # and it goes on from there
    assert new == len(order)
    index.check_integrity()


def test_keys_that_begin_alike_are_told_apart_when_they_are_loaded() -> None:
    """More than a bucket holds, in two namespaces: of each, a chain of keys with the same first
    8 bytes, and one below a key that is not there."""
    index = Index(64, 7)
    chain = [b"alike..." + key_of(at)[8:] for at in range(12)]
    absent = b"alike..." + key_of("absent")[8:]
    keys = np.frombuffer(b"".join([*chain, key_of("below")] * 2), np.uint8).reshape(-1, 32)
    above = [bytes(32), *chain[:-1], absent]
    parents = np.frombuffer(b"".join(above * 2), np.uint8).reshape(-1, 32)
    roots = np.tile([True] + [False] * 12, 2)
    namespaces = np.repeat(np.array([3, 4], np.int32), 13)
    index.load(namespaces, keys, parents, roots)
    index.check_integrity()
    assert index.parent[:26].tolist() == [ROOT, *range(11), ORPHAN, ROOT, *range(13, 24), ORPHAN]
    assert index.find(4, b"".join(chain)).rows.tolist() == list(range(13, 25))
    assert index.orphaned == 2
