"""The index: against a dict and a tree of plain Python objects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.store.index import LINKED, NO_ROW, ORPHAN, ORPHANED, ROOT, UNLINKED, Index

CAPACITY = 8
"""Half of the smallest table, so clusters form, merge and wrap around all the time."""
KEYS = [
    tag.to_bytes(8, "little") + rest.to_bytes(24, "big") for tag in range(4) for rest in range(4)
]
"""Four of each 64-bit tag: an equal tag says little, an equal key nothing without namespace."""
NAMESPACES = (1, 2)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@dataclass(eq=False)
class Node:
    """What the model knows of a row."""

    name: tuple[int, bytes]
    row: int
    parent: Node | None
    orphan: bool = False
    children: list[Node] = field(default_factory=list)

    def below(self) -> list[Node]:
        return [self, *(node for child in self.children for node in child.below())]

    def chained(self) -> bool:
        """Whether the way up ends at a root."""
        return not self.orphan and (self.parent is None or self.parent.chained())


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(CAPACITY, seed=7)
        self.nodes: dict[tuple[int, bytes], Node] = {}
        self.unlinked: list[int] = []

    def pick(self, data: st.DataObject, nodes: list[Node]) -> Node:
        return data.draw(st.sampled_from(nodes), "node")

    @precondition(lambda self: self.index.room)
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), name=st.sampled_from(KEYS))
    def insert(self, data: st.DataObject, namespace: int, name: bytes) -> None:
        if (namespace, name) in self.nodes:
            return
        peers = [node for node in self.nodes.values() if node.name[0] == namespace]
        above = data.draw(st.sampled_from([None, *peers]), "parent")
        row = self.index.insert(namespace, name, above.row if above else ROOT)
        assert row not in self.unlinked
        assert row not in [node.row for node in self.nodes.values()]
        node = Node((namespace, name), row, above)
        self.nodes[namespace, name] = node
        if above:
            above.children.append(node)

    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        names=st.lists(st.sampled_from(KEYS), unique=True),
    )
    def insert_chain(self, data: st.DataObject, namespace: int, names: list[bytes]) -> None:
        names = [name for name in names if (namespace, name) not in self.nodes][: self.index.room]
        peers = [node for node in self.nodes.values() if node.name[0] == namespace]
        above = data.draw(st.sampled_from([None, *peers]), "parent")
        rows = self.index.insert_chain(namespace, b"".join(names), above.row if above else ROOT)
        assert rows.dtype == np.intp
        for name, row in zip(names, rows.tolist(), strict=True):
            node = Node((namespace, name), row, above)
            self.nodes[namespace, name] = node
            if above:
                above.children.append(node)
            above = node

    @rule(data=st.data(), count=st.integers(1, 8))
    def cut(self, data: st.DataObject, count: int) -> None:
        """Leaves go together: each is one when the one before has gone."""
        gone = []
        for _ in range(min(count, len(self.nodes))):
            node = self.pick(data, [node for node in self.nodes.values() if not node.children])
            if node.parent:
                node.parent.children.remove(node)
            freed = node.parent.row if node.parent and not node.parent.children else NO_ROW
            assert self.index.cut(node.row) == freed
            del self.nodes[node.name]
            gone.append(node.row)
        assert self.index.unlink_cut().tolist() == gone
        self.unlinked += gone

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        node = self.pick(data, list(self.nodes.values()))
        below = self.index.unlink(node.row)
        assert sorted(below) == sorted(other.row for other in node.below()[1:])
        assert all(
            below.index(other.row) < below.index(child.row)
            for other in node.below()[1:]
            for child in other.children
        ), "parents come first"
        del self.nodes[node.name]
        self.unlinked.append(node.row)
        if node.parent:
            node.parent.children.remove(node)
        for child in node.children:
            child.parent, child.orphan = None, True

    @precondition(lambda self: any(node.orphan for node in self.nodes.values()))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        orphan = self.pick(data, [node for node in self.nodes.values() if node.orphan])
        above = [
            node
            for node in self.nodes.values()
            if node.chained() and node.name[0] == orphan.name[0]
        ]
        if above:
            parent = self.pick(data, above)
            self.index.adopt(orphan.row, parent.row)
            orphan.parent, orphan.orphan = parent, False
            parent.children.append(orphan)

    @precondition(lambda self: self.unlinked)
    @rule()
    def release(self) -> None:
        self.index.release(self.unlinked.pop())

    @rule()
    def release_all(self) -> None:
        self.index.release_all(np.array(self.unlinked, np.intp))
        self.unlinked.clear()

    @rule(namespace=st.sampled_from(NAMESPACES))
    def unlink_all(self, namespace: int) -> None:
        gone = [name for name in self.nodes if name[0] == namespace]
        rows = [self.nodes.pop(name).row for name in gone]
        self.index.unlink_all(np.array(rows, np.intp))
        self.unlinked += rows

    @rule(namespace=st.sampled_from(NAMESPACES), names=st.lists(st.sampled_from(KEYS), max_size=12))
    def find(self, namespace: int, names: list[bytes]) -> None:
        found = self.index.find(namespace, b"".join(names))
        for at, name in enumerate(names):
            node = self.nodes.get((namespace, name))
            row = node.row if node else NO_ROW
            assert found.rows[at] == row == self.index.find_one(namespace, name)
            if node:
                assert found.parent[at] == self.index.parent_at[row]
                assert found.resident[at] == self.index.resident_at[row]
                assert found.extents[at].tolist() == self.index.extents[0][row].tolist()

    @rule(data=st.data(), parts=st.integers(0, 3), address=st.integers(0, 1 << 40))
    def store(self, data: st.DataObject, parts: int, address: int) -> None:
        if self.nodes:
            row = self.pick(data, list(self.nodes.values())).row
            self.index.resident_at[row] = parts
            self.index.address_at[0][row] = address
            self.index.generation_at[0][row] = address + 1

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        index = self.index
        index.check_integrity()
        assert index.count == len(self.nodes)
        assert index.room == CAPACITY - len(self.nodes) - len(self.unlinked)
        assert sorted(index.linked_rows().tolist()) == sorted(n.row for n in self.nodes.values())
        for row in self.unlinked:
            assert index.state_at[row] == UNLINKED
            index.resident_at[row] = 0
        for (_, name), node in self.nodes.items():
            parent = node.parent.row if node.parent else ORPHAN if node.orphan else ROOT
            assert index.key_bytes(node.row) == name
            assert index.parent_at[node.row] == parent
            assert index.state_at[node.row] == (LINKED if node.chained() else ORPHANED)
            assert sorted(index.children_of(node.row)) == sorted(n.row for n in node.children)
            assert sorted(index.subtree(node.row)) == sorted(n.row for n in node.below())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_key_whose_fingerprint_is_that_of_empty_entries_is_found_in_a_batch() -> None:
    """Key 0 of namespace 1 hashes to 0 under seed 1, and so its bucket is full of its like."""
    index = Index(1000, seed=1)
    row = index.insert(1, key(0), ROOT)
    asked = b"".join(map(key, [7, 0, 8, 9, 10]))
    assert index.find(1, asked).rows.tolist() == [NO_ROW, row, NO_ROW, NO_ROW, NO_ROW]


@pytest.mark.parametrize("count", [1, 4, 5, 300])
def test_a_batch_is_found_in_the_order_asked_hits_and_misses_mixed(count: int) -> None:
    index = Index(1000, seed=1)
    rows = {number: index.insert(1, key(number), ROOT) for number in range(0, 600, 2)}
    asked = list(range(count - 1, -1, -1))
    found = index.find(1, b"".join(map(key, asked)))
    assert found.rows.tolist() == [rows.get(number, NO_ROW) for number in asked]
    assert found.rows.dtype == np.intp


def test_one_key_in_two_namespaces_is_two_rows() -> None:
    index = Index(8, seed=1)
    first, second = index.insert(1, key(5), ROOT), index.insert(2, key(5), ROOT)
    assert first != second
    assert index.find(1, key(5) * 6).rows.tolist() == [first] * 6
    assert index.find(2, key(5) * 6).rows.tolist() == [second] * 6
    assert index.find(3, key(5) * 6).rows.tolist() == [NO_ROW] * 6


def test_keys_that_differ_only_in_their_last_byte_are_kept_apart() -> None:
    index = Index(300, seed=1)
    names = [bytes(31) + bytes([number]) for number in range(256)]
    rows = [index.insert(1, name, ROOT) for name in names]
    assert index.find(1, b"".join(names)).rows.tolist() == rows
    for row, name in zip(rows[::2], names[::2], strict=True):
        index.unlink(row)
        assert index.find_one(1, name) == NO_ROW
    assert index.find(1, b"".join(names[1::2])).rows.tolist() == rows[1::2]


def test_every_row_can_be_used_and_used_again() -> None:
    index = Index(CAPACITY, seed=1)
    for round_ in range(3):
        names = [key(CAPACITY * round_ + number) for number in range(CAPACITY)]
        rows = [index.insert(1, name, ROOT) for name in names]
        assert sorted(rows) == list(range(CAPACITY))
        assert index.room == 0
        for row in rows:
            index.unlink(row)
            index.release(row)
        assert index.room == CAPACITY and index.count == 0
        index.check_integrity()


def test_a_row_used_again_remembers_nothing() -> None:
    index = Index(2, seed=1)
    root = index.insert(1, key(1), ROOT)
    leaf = index.insert(1, key(2), root)
    index.unlink(leaf)
    index.release(leaf)
    again = index.insert(1, key(3), ROOT)
    assert again == leaf
    assert index.parent_at[again] == ROOT
    assert index.resident_at[again] == index.children_at[again] == index.leases_at[again] == 0
    assert index.children_of(root) == index.children_of(again) == []


def test_a_long_chain_is_orphaned_and_adopted_without_recursion() -> None:
    index = Index(20_000, seed=1)
    rows = [index.insert(1, key(0), ROOT)]
    for number in range(1, 20_000):
        rows.append(index.insert(1, key(number), rows[-1]))
    assert index.unlink(rows[1]) == rows[2:]
    assert (index.state[rows[2:]] == ORPHANED).all() and index.parent_at[rows[2]] == ORPHAN
    index.adopt(rows[2], rows[0])
    assert (index.state[rows[2:]] == LINKED).all()
    assert index.subtree(rows[0]) == [rows[0], *rows[2:]]


def test_a_new_row_below_an_orphan_is_orphaned_too() -> None:
    index = Index(8, seed=1)
    rows = [index.insert(1, key(0), ROOT)]
    rows.append(index.insert(1, key(1), rows[0]))
    index.unlink(rows[0])
    below = index.insert(1, key(2), rows[1])
    assert index.state_at[below] == ORPHANED


def test_all_children_of_a_row_that_is_deleted_are_orphaned_and_adopted_one_by_one() -> None:
    index = Index(8, seed=1)
    root = index.insert(1, key(0), ROOT)
    children = [index.insert(1, key(number), root) for number in (1, 2, 3)]
    assert sorted(index.unlink(root)) == children
    assert index.orphaned == 3
    index.check_integrity()
    again = index.insert(1, key(0), ROOT)
    for count, child in enumerate(children, 1):
        index.adopt(child, again)
        assert sorted(index.children_of(again)) == children[:count]
        index.check_integrity()


def test_parts_can_be_added_while_rows_are_in_use() -> None:
    index = Index(8, seed=1)
    row = index.insert(1, key(0), ROOT)
    index.address_at[0][row] = 64
    index.ensure_parts(3)
    index.ensure_parts(2)
    assert len(index.extents) == len(index.address_at) == len(index.generation_at) == 3
    index.address_at[2][row], index.generation_at[2][row] = 128, 9
    assert index.extents[0][row].tolist() == [64, 0]
    assert index.extents[2][row].tolist() == [128, 9]


def test_long_chains_come_and_go_at_once() -> None:
    """Two thirds of the table are in use, so that buckets spill, and chains meet in buckets."""
    index = Index(3000, seed=1)
    chains: list[list[int]] = []
    for round_ in range(400):
        names = [key(number) for number in range(30 * round_, 30 * round_ + 30)]
        above = chains[-1][14] if chains else ROOT
        chains.append(index.insert_chain(1, b"".join(names), above).tolist())
        assert index.find(1, b"".join(names)).rows.tolist() == chains[-1]
        assert index.parent[chains[-1]].tolist() == [above, *chains[-1][:-1]]
        if len(chains) == 90:
            for row in chains[45][::-1][:15]:
                index.cut(row)
            for chain in chains[46:][::-1]:
                for row in chain[::-1]:
                    index.cut(row)
            index.release_all(index.unlink_cut())
            chains = chains[:45]
    index.check_integrity()


def test_whatever_spilled_is_found_behind_a_gap() -> None:
    """Half of the table is in use. A batch that ends in absent keys is mostly done at once."""
    index = Index(4000, seed=1)
    names = [hashlib.sha256(key(number)).digest() for number in range(4000)]
    rows = [index.insert(1, name, ROOT) for name in names]
    begin = b"".join([*names[:6], key(1)])
    for name, row in zip(names, rows, strict=True):
        assert index.find(1, begin + name).rows.tolist() == [*rows[:6], NO_ROW, row]


def test_rows_are_forgotten_by_namespace_and_the_others_stay() -> None:
    index = Index(4000, seed=3)
    rows = {
        (namespace, number): index.insert(namespace, key(number), ROOT)
        for number in range(1000)
        for namespace in (1, 2, 3)
    }
    index.unlink_all(np.array([rows[2, number] for number in range(1000)], np.intp))
    names = b"".join(map(key, range(1000)))
    assert (index.find(2, names).rows == NO_ROW).all()
    for namespace in (1, 3):
        assert index.find(namespace, names).rows.tolist() == [
            rows[namespace, number] for number in range(1000)
        ]
    index.check_integrity()
