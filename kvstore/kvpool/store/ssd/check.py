"""Looking through a tier that no daemon uses: is everything there that its catalogue names?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import ConfigError, KvpoolError
from kvpool.proto.namespace import Namespace
from kvpool.store.ssd.disk import COMMIT_MAX, Catalogue
from kvpool.store.ssd.entries import Entry, SpaceRecord
from kvpool.store.ssd.files import Files
from kvpool.store.ssd.folder import Folder, Identity
from kvpool.store.ssd.listing import claim, read_listing
from kvpool.store.ssd.lmdb_catalogue import LmdbCatalogue, map_bytes_for
from kvpool.store.ssd.space import Space
from kvpool.store.ssd.verify import Form, fault, forms_of


@dataclass(frozen=True, slots=True)
class Finding:
    """One chunk of the catalogue, and what is wrong with it (nothing: empty)."""

    key: bytes
    namespace: str
    """First 16 hex digits of its digest; empty if the catalogue does not know it."""
    nbytes: int
    wrong: str


@dataclass(slots=True)
class Report:
    """What was found in one folder."""

    identity: Identity
    spaces: list[dict[str, str]]
    chunks: int = 0
    nbytes: int = 0
    damaged: list[Finding] = field(default_factory=list)
    repaired: int = 0


def open_space(record: SpaceRecord) -> tuple[Namespace, tuple[Form, ...]]:
    """The namespace of a record. Raises `ConfigError` if it is not what its digest says."""
    try:
        namespace = Namespace.from_record(wire.NamespaceRecord.FromString(record.record))
    except (DecodeError, KvpoolError) as error:
        raise ConfigError(f"namespace {record.digest.hex()[:16]} is damaged: {error}") from error
    digest = namespace.digest(record.tenant)
    if digest != record.digest:
        raise ConfigError(
            f"namespace {record.digest.hex()[:16]} reads as {digest.hex()[:16]}: it was written by "
            "a version that encodes namespaces differently"
        )
    return namespace, forms_of(namespace, digest)


def check_folder(
    path: str,
    *,
    repair: bool = False,
    seen: Callable[[Finding], None] = lambda finding: None,
) -> Report:
    """Reads every byte that the catalogue of `path` names and compares it with its sums.

    `seen` gets each chunk. `repair` takes what is damaged out of the catalogue. Raises
    `ConfigError` for a folder that a daemon uses, or that is none.
    """
    folder = Folder(path, create=False)
    try:
        identity = folder.identity()
        assert identity is not None, "it was opened as a folder that has one"
        count = sum(name.startswith("data.") for name in folder.names())
        files = Files(
            folder,
            count,
            identity.file_bytes,
            identity.block_bytes,
            direct=False,
            reserve=False,
        )
        catalogue = LmdbCatalogue(folder, map_bytes_for(0))
        try:
            return _check(identity, files, count, catalogue, repair, seen)
        finally:
            catalogue.close()
            files.close()
    finally:
        folder.close()


def _check(
    identity: Identity,
    files: Files,
    count: int,
    catalogue: Catalogue,
    repair: bool,
    seen: Callable[[Finding], None],
) -> Report:
    forms, spaces = {}, []
    for record in catalogue.spaces():
        spaces.append({"tenant": record.tenant, "digest": record.digest.hex(), "wrong": ""})
        try:
            namespace, forms[record.number] = open_space(record)
            spaces[-1]["model"] = namespace.model
        except ConfigError as error:
            spaces[-1]["wrong"] = str(error)
    report = Report(identity, spaces)
    for finding in _findings(identity, files, count, catalogue, forms):
        report.chunks += 1
        report.nbytes += finding.nbytes
        if finding.wrong:
            report.damaged.append(finding)
        seen(finding)
    if repair:
        keys = [finding.key for finding in report.damaged]
        for at in range(0, len(keys), COMMIT_MAX):
            catalogue.commit([], keys[at : at + COMMIT_MAX])
        report.repaired = len(keys)
    return report


def _findings(
    identity: Identity,
    files: Files,
    count: int,
    catalogue: Catalogue,
    forms: dict[int, tuple[Form, ...]],
) -> Iterator[Finding]:
    pairs = list(catalogue.pairs())
    listing, unreadable = read_listing(pairs, len(pairs))
    space = Space(count, identity.file_bytes, identity.segment_bytes, identity.block_bytes)
    contradicting = {bytes(key) for key in listing.keys[~claim(listing, space)]}
    broken = set(unreadable)
    for key, value in pairs:
        if key in broken:
            yield Finding(key, "", 0, "its entry in the catalogue is no entry")
            continue
        entry = Entry.unpack(key, value)
        nbytes = sum(extent.nbytes for extent in entry.extents)
        parts = forms.get(entry.space)
        if parts is None:
            yield Finding(key, "", nbytes, "the catalogue does not know its namespace")
            continue
        wrong = "its place is outside the files, or another chunk's"
        if key not in contradicting:
            wrong = next(filter(None, _faults(files, entry, parts)), "")
        yield Finding(key, parts[0].digest.hex()[:16], nbytes, wrong)


def _faults(files: Files, entry: Entry, forms: tuple[Form, ...]) -> Iterator[str]:
    for extent in entry.extents:
        if extent.part >= len(forms):
            yield f"the namespace has no part {extent.part}"
            continue
        content = np.empty(extent.nbytes, np.uint8)
        try:
            files.read(extent.address, content)
        except OSError as error:
            yield f"part {extent.part} cannot be read: {error}"
            continue
        wrong = fault(content, forms[extent.part], entry.key, extent)
        yield f"part {extent.part}: {wrong}" if wrong else ""
