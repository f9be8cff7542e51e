"""How a tier starts below a store: what an earlier life left is taken over, or said and removed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvpool.proto.errors import KvpoolError
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.admission import DEFAULT_ADMISSION, make_admission
from kvpool.store.index import rows_for
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.ssd.attached import Ssd
from kvpool.store.ssd.check import open_space
from kvpool.store.ssd.demotion import Memory
from kvpool.store.ssd.entries import SpaceRecord
from kvpool.store.ssd.lanes import Lanes
from kvpool.store.ssd.listing import Listing, claim, read_listing
from kvpool.store.ssd.opening import Opened, open_folder
from kvpool.store.ssd.shelf import Shelf, usable
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.speed import Speed
from kvpool.store.ssd.tier import FREE_BYTES_MIN, QUEUE_BYTES, Tier
from kvpool.store.store import Store

log = logging.getLogger("kvpool")


@dataclass(frozen=True, slots=True)
class Found:
    """An open folder, and what its catalogue says."""

    opened: Opened
    chunks: int
    """Rows of the index."""
    listing: Listing
    damaged: list[bytes]
    spaces: list[SpaceRecord]


def look(path: str, capacity: int, chunks: int) -> Found:
    """Opens a folder, tries the device and reads the catalogue. Blocks. Raises `ConfigError`."""
    rows = chunks or rows_for(capacity)
    opened = open_folder(path, capacity, rows)
    try:
        if opened.files.free_bytes() >= FREE_BYTES_MIN:  # else it serves what is there
            opened.files.check()
        catalogue = opened.catalogue
        listing, damaged = read_listing(catalogue.pairs(), catalogue.figures()["entries"])
        return Found(opened, rows, listing, damaged, catalogue.spaces())
    except BaseException:
        opened.close()
        raise


def attach(
    store: Store,
    found: Found,
    lanes: Lanes,
    memory: Memory,
    *,
    seed: int,
    write_through: bool,
    admission: str = DEFAULT_ADMISSION,
    queue_bytes: int = QUEUE_BYTES,
    clock: Callable[[], float],
) -> Ssd:
    """The tier of `found` below `store`, serving what was there.

    Raises `ConfigError` for an admission that the store's policy cannot answer.
    """
    policy = store.options.policy
    make_admission(admission, make_policy(policy, 1, lambda rows: rows < 0))
    opened, identity = found.opened, found.opened.identity
    space = Space(opened.count, identity.file_bytes, identity.segment_bytes, identity.block_bytes)
    access = opened.access
    tier = Tier(
        opened.files,
        opened.catalogue,
        lanes,
        space,
        clock=clock,
        speed=Speed(access.bytes_s),
        queue_bytes=queue_bytes,
    )
    rows, lessons = max(found.chunks, len(found.listing)), store.room.lessons
    shelf = Shelf(tier, rows, policy, seed, lessons)
    known = _known_spaces(store, shelf, found.spaces)
    _load(shelf, found, known)
    store.skip_generations(shelf.newest_generation())
    tier.catalogue_figures = opened.catalogue.figures()
    ssd = Ssd(store, shelf, memory, write_through=write_through, admission=admission)
    ssd.facts = {
        **asdict(access),
        "path": str(opened.folder.path),
        "identity": identity.id,
        "capacity": space.capacity_bytes,
    }
    store.ssd = ssd
    return ssd


def _known_spaces(
    store: Store, shelf: Shelf, records: list[SpaceRecord]
) -> dict[int, KnownNamespace]:
    """By number in the catalogue: the namespaces that can be served again."""
    known = {}
    for record in records:
        try:
            namespace, _ = open_space(record)
            opened, _ = store.open_namespace(record.tenant, namespace)
        except KvpoolError as error:
            log.warning("chunks of tenant %r on the SSD are given up: %s", record.tenant, error)
            shelf.skip_number(record.number)
            continue
        shelf.meet(opened, record.number)
        known[record.number] = opened
    return known


def _load(shelf: Shelf, found: Found, known: dict[int, KnownNamespace]) -> None:
    """Fills the shelf; what contradicts itself, the files or the namespaces leaves."""
    listing = found.listing
    sizes = {number: space.extent_bytes for number, space in known.items()}
    good = usable(listing, lambda number: sizes.get(number, ()))
    fitting = listing.take(good)
    claimed = claim(fitting, shelf.tier.space)
    kept = fitting.take(claimed)
    shelf.load(kept, known.get)
    lost = [bytes(key) for key in listing.take(~good).keys]
    lost += [bytes(key) for key in fitting.take(~claimed).keys]
    for key in (*found.damaged, *lost):
        shelf.tier.delete(key)
    shelf.tier.flush()
    if found.damaged or lost:
        count = len(found.damaged) + len(lost)
        log.warning("%d entries on the SSD are of no use any more and were removed", count)
    if len(kept):
        log.info("%d chunks are on the SSD at %s", len(kept), found.opened.folder.path)
