"""Namespaces share KV only when every field is equal, and none can be missing."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, NamespaceError
from kvpool.proto.layout import NBYTES_MAX, PARTS_MAX, PLANES_MAX, Part, Plane
from kvpool.proto.namespace import CHUNK_TOKENS_MAX, Namespace
from tests.proto.examples import examples
from tests.proto.samples import NATIVE, PORTABLE

PLANE = Plane("l0", 64, 2)
PART = Part("tp0", (PLANE, Plane("l1", 32, 0)))
BASE = replace(PORTABLE, parts=(PART, Part("tp1", (PLANE,))))

OTHER: dict[str, Any] = {
    "model": "org/other",
    "revision": "fedcba",
    "kv_dtype": "float16",
    "kv_scales": "sha256:01",
    "layout": "native:engine",
    "chunk_tokens": 8,
    "parts": BASE.parts[:1],
    "key_scheme": "foreign:engine",
    "adapter": "lora",
    "rope": "yarn",
    "salt": "pepper",
}
"""Another valid value for each field; a field that is missing here fails the tests below."""
OTHER_PART: dict[str, Any] = {"name": "tp9", "planes": (PLANE,), "window": 4}
OTHER_PLANE: dict[str, Any] = {"name": "l9", "nbytes": 66, "runs": 1}
TEXTS = [name for name, value in OTHER.items() if isinstance(value, str)]
LAYOUT = {"layout", "chunk_tokens", "parts"}


def names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


# Identity


@pytest.mark.parametrize("name", names(Namespace))
def test_changing_any_one_field_changes_the_digest(name: str) -> None:
    other = replace(BASE, **{name: OTHER[name]})
    assert other.digest("a") != BASE.digest("a")
    assert Namespace.from_record(other.to_record()) == other
    [difference] = other.differences(BASE)
    assert difference.startswith(f"{name}: ")


@pytest.mark.parametrize("name", names(Namespace))
def test_the_layout_id_depends_only_on_layout_chunk_and_parts(name: str) -> None:
    other = replace(BASE, **{name: OTHER[name]})
    assert (other.layout_id != BASE.layout_id) is (name in LAYOUT)
    kept = other.without_layout() == BASE.without_layout()
    assert kept is (name in LAYOUT or name == "key_scheme")


@pytest.mark.parametrize("name", names(Part))
def test_changing_any_one_field_of_a_part_changes_the_digest(name: str) -> None:
    part = replace(PART, **{name: OTHER_PART[name]})
    other = replace(BASE, parts=(part, *BASE.parts[1:]))
    assert other.digest("a") != BASE.digest("a")
    assert other.layout_id != BASE.layout_id
    assert Namespace.from_record(other.to_record()) == other


@pytest.mark.parametrize("name", names(Plane))
def test_changing_any_one_field_of_a_plane_changes_the_digest(name: str) -> None:
    plane = replace(PLANE, **{name: OTHER_PLANE[name]})
    other = replace(BASE, parts=(replace(PART, planes=(plane, *PART.planes[1:])), *BASE.parts[1:]))
    assert other.digest("a") != BASE.digest("a")
    assert other.layout_id != BASE.layout_id
    assert Namespace.from_record(other.to_record()) == other


def test_the_order_of_parts_and_of_planes_is_part_of_the_identity() -> None:
    assert replace(BASE, parts=BASE.parts[::-1]).digest("a") != BASE.digest("a")
    turned = replace(PART, planes=PART.planes[::-1])
    assert replace(BASE, parts=(turned, BASE.parts[1])).digest("a") != BASE.digest("a")


def test_tenants_never_meet() -> None:
    digests = {BASE.digest(tenant) for tenant in ("a", "b", "A", "ab", BASE.model, "none")}
    assert len(digests) == 6


def test_equal_records_built_apart_have_equal_digests() -> None:
    twin = copy.deepcopy(BASE)
    assert twin is not BASE
    assert twin == BASE
    assert twin.digest("a") == BASE.digest("a")
    assert len(twin.digest("a")) == 32
    assert 0 <= twin.layout_id < 1 << 64


@pytest.mark.parametrize(("one", "two"), list(combinations(TEXTS, 2)))
def test_a_character_that_moves_to_another_field_changes_the_digest(one: str, two: str) -> None:
    base = replace(BASE, layout="native:x", key_scheme="foreign:x")
    here = replace(base, **{one: getattr(base, one) + "o"})
    there = replace(base, **{two: getattr(base, two) + "o"})
    assert here.digest("a") != there.digest("a")


def test_a_character_that_moves_between_tenant_and_model_changes_the_digest() -> None:
    assert replace(BASE, model="bc").digest("a") != replace(BASE, model="c").digest("ab")


def test_a_plane_that_moves_between_parts_changes_the_digest() -> None:
    a, b, c = (Plane(name, 8, 0) for name in "abc")
    here = replace(BASE, parts=(Part("p", (a, b)), Part("q", (c,))))
    there = replace(BASE, parts=(Part("p", (a,)), Part("q", (b, c))))
    assert here.digest("a") != there.digest("a")


word = st.text("ab\0é", min_size=1, max_size=3)
planes = st.lists(
    st.builds(Plane, word, st.sampled_from([2, 4]), st.sampled_from([0, 1, 2])),
    min_size=1,
    max_size=2,
    unique_by=lambda plane: plane.name,
).map(tuple)
part_tables = st.lists(
    st.builds(Part, word, planes, st.sampled_from([None, 1, 2])),
    min_size=1,
    max_size=2,
    unique_by=lambda part: part.name,
).filter(lambda parts: any(part.window is None for part in parts))
namespaces = st.builds(
    Namespace,
    model=word,
    revision=word,
    kv_dtype=word,
    kv_scales=word,
    layout=st.sampled_from(["portable", "native:a", "native:aa"]),
    chunk_tokens=st.sampled_from([1, 2]),
    parts=part_tables.map(tuple),
    key_scheme=st.sampled_from(["tokens", "foreign:a", "foreign:aa"]),
    adapter=word,
    rope=word,
    salt=word,
)


@given(namespaces, namespaces, word, word)
@examples(0.3)
def test_digests_are_equal_exactly_when_everything_is(
    a: Namespace, b: Namespace, tenant: str, other_tenant: str
) -> None:
    same = (a, tenant) == (b, other_tenant)
    assert (a.digest(tenant) == b.digest(other_tenant)) is same
    layouts = [(n.layout, n.chunk_tokens, n.parts) for n in (a, b)]
    assert (a.layout_id == b.layout_id) is (layouts[0] == layouts[1])
    assert (a.differences(b) == []) is (a == b)


@given(st.text("ab", min_size=7, max_size=12), st.data())
@examples(0.5)
def test_one_text_cut_differently_into_fields_gives_different_digests(
    text: str, data: st.DataObject
) -> None:
    free = [name for name in TEXTS if name not in ("layout", "key_scheme")]
    places = st.sets(st.integers(1, len(text) - 1), min_size=6, max_size=6).map(sorted)
    cuts = data.draw(st.tuples(places, places))

    def record(cut: list[int]) -> Namespace:
        pieces = [text[i:j] for i, j in pairwise([0, *cut, len(text)])]
        values: dict[str, Any] = dict(zip(free, pieces, strict=True))
        return replace(BASE, **values)

    a, b = map(record, cuts)
    assert (a.digest("t") == b.digest("t")) is (cuts[0] == cuts[1])


# The record that travels


@given(namespaces)
@examples(0.3)
def test_a_record_survives_the_wire(namespace: Namespace) -> None:
    raw = namespace.to_record().SerializeToString()
    assert Namespace.from_record(wire.NamespaceRecord.FromString(raw)) == namespace


def test_the_record_has_the_fields_of_the_namespace_and_no_others() -> None:
    for message, cls in (
        (wire.NamespaceRecord, Namespace),
        (wire.PartRecord, Part),
        (wire.PlaneRecord, Plane),
    ):
        assert [field.name for field in message.DESCRIPTOR.fields] == names(cls)


@pytest.mark.parametrize("name", names(Namespace))
def test_a_record_without_a_field_is_refused_by_name(name: str) -> None:
    record = BASE.to_record()
    record.ClearField(name)
    with pytest.raises(NamespaceError, match=name):
        Namespace.from_record(record)


def test_a_field_of_a_newer_version_in_a_record_is_tolerated() -> None:
    raw = BASE.to_record().SerializeToString() + b"\xf2\x3f\x03new"  # field 1022
    assert Namespace.from_record(wire.NamespaceRecord.FromString(raw)) == BASE


def test_a_record_with_too_many_parts_or_planes_is_refused_before_they_are_built() -> None:
    record = BASE.to_record()
    # None of these could be built: the names are empty.
    record.parts.extend(wire.PartRecord() for _ in range(PARTS_MAX))
    with pytest.raises(NamespaceError, match=f"'parts' has {PARTS_MAX + 2} parts"):
        Namespace.from_record(record)
    record = BASE.to_record()
    record.parts[0].planes.extend(wire.PlaneRecord() for _ in range(PLANES_MAX))
    with pytest.raises(NamespaceError, match=f"has {PLANES_MAX + 2} planes"):
        Namespace.from_record(record)


def test_the_largest_numbers_that_the_wire_carries_are_accepted_or_refused_by_name() -> None:
    record = BASE.to_record()
    record.parts[0].planes[0].nbytes = 2**64 - 1
    with pytest.raises(InvalidError, match="plane 'l0'"):
        Namespace.from_record(record)
    record.parts[0].planes[0].nbytes = NBYTES_MAX
    with pytest.raises(InvalidError, match="part 'tp0'"):
        Namespace.from_record(record)
    record = BASE.to_record()
    record.chunk_tokens = 2**32 - 1
    with pytest.raises(NamespaceError, match="chunk_tokens"):
        Namespace.from_record(record)
    record = BASE.to_record()
    record.parts[0].window = 2**32 - 1
    assert Namespace.from_record(record).to_record() == record


# What is refused


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [None, "", 0, b"bytes", True, "\ud800"])
def test_a_text_that_is_missing_empty_or_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(NamespaceError, match=name):
        replace(BASE, **{name: value})


@pytest.mark.parametrize("value", [None, 0, -1, 1.0, True, "4", CHUNK_TOKENS_MAX + 1])
def test_a_chunk_size_that_is_no_small_positive_int_is_refused(value: Any) -> None:
    with pytest.raises(NamespaceError, match="chunk_tokens"):
        replace(BASE, chunk_tokens=value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        [PART],
        (PART, PART),
        ("tp0",),
        (Part("state", (PLANE,), window=4),),
        tuple(Part(str(i), (PLANE,)) for i in range(PARTS_MAX + 1)),
    ],
    ids=["None", "empty", "a list", "a name twice", "no Part", "only windows", "too many"],
)
def test_a_part_table_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(NamespaceError, match="'parts'"):
        replace(BASE, parts=value)


@pytest.mark.parametrize("name", names(Namespace))
def test_a_forgotten_argument_is_named(name: str) -> None:
    values = {field: getattr(BASE, field) for field in names(Namespace) if field != name}
    with pytest.raises(TypeError, match=name):
        Namespace(**values)


@pytest.mark.parametrize("value", ["Portable", "native", "native:", "native:a b", "portable\n"])
def test_an_unknown_layout_is_refused(value: str) -> None:
    with pytest.raises(NamespaceError, match="layout"):
        replace(BASE, layout=value)


@pytest.mark.parametrize("value", ["Tokens", "foreign", "foreign:", "foreign:a/b", "tokens\n"])
def test_an_unknown_key_scheme_is_refused(value: str) -> None:
    with pytest.raises(NamespaceError, match="key_scheme"):
        replace(BASE, key_scheme=value)


@pytest.mark.parametrize("tenant", [None, "", 7, b"a", "\udcff"])
def test_a_digest_needs_a_tenant(tenant: Any) -> None:
    with pytest.raises(NamespaceError, match="tenant"):
        BASE.digest(tenant)


# Parts and differences


def test_parts_are_chosen_by_name_or_bitmap() -> None:
    assert BASE.all_parts == 0b11
    assert BASE.part_mask(None) == 0b11
    assert BASE.part_mask(("tp1",)) == 0b10
    assert BASE.part_mask(("tp1", "tp0", "tp1")) == 0b11
    assert BASE.part_indices(0) == (0, 1)
    assert BASE.part_indices(0b10) == (1,)
    with pytest.raises(NamespaceError, match=r"no part 'tp9'; the namespace has tp0, tp1"):
        BASE.part_mask(("tp0", "tp9"))
    with pytest.raises(NamespaceError, match="None means all"):
        BASE.part_mask(())


@pytest.mark.parametrize("parts", [0b100, 0b111, 1 << 63, (1 << 64) - 1, -1])
def test_a_bitmap_beyond_the_declared_parts_is_refused(parts: int) -> None:
    with pytest.raises(NamespaceError, match="beyond the 2 declared"):
        BASE.part_indices(parts)


def test_sixty_four_parts_fill_the_bitmap() -> None:
    full = replace(BASE, parts=tuple(Part(str(i), (PLANE,)) for i in range(64)))
    assert full.all_parts == 2**64 - 1
    assert full.part_indices(2**64 - 1) == full.part_indices(0) == tuple(range(64))
    assert full.part_indices(1 << 63) == (63,)


def test_differences_show_both_sides_of_each_field() -> None:
    assert NATIVE.differences(NATIVE) == []
    assert replace(BASE, salt="x", chunk_tokens=8).differences(BASE) == [
        "chunk_tokens: 8 / 4",
        "salt: 'x' / 'none'",
    ]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((PART,), "parts: 1 parts / 2 parts"),
        ((replace(PART, name="x"), BASE.parts[1]), "parts: part 0 has name 'x' / 'tp0'"),
        ((PART, replace(BASE.parts[1], window=4)), "parts: part 1 has window 4 / None"),
        ((replace(PART, planes=(PLANE,)), BASE.parts[1]), "parts: part 0 has 1 planes / 2 planes"),
        (
            (PART, replace(BASE.parts[1], planes=(Plane("l0", 64, 4),))),
            "parts: part 1 has Plane(name='l0', nbytes=64, runs=4) / "
            "Plane(name='l0', nbytes=64, runs=2)",
        ),
    ],
)
def test_a_difference_of_part_tables_is_short_and_says_where(
    parts: tuple[Part, ...], text: str
) -> None:
    assert replace(BASE, parts=parts).differences(BASE) == [text]
