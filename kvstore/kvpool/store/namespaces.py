"""The namespaces that somebody opened, and what follows from each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpool.proto.chunk import extent_bytes
from kvpool.proto.errors import BusyError
from kvpool.proto.namespace import Namespace
from kvpool.store.accounts import Account
from kvpool.store.eviction.base import Policy

Shape = tuple[int, ...]
"""The size classes of a chunk's parts, ascending."""


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace that somebody opened, with what follows from it."""

    id: int
    tenant: str
    namespace: Namespace
    digest: bytes
    extent_bytes: tuple[int, ...]
    """By part."""
    shape: Shape
    policy: Policy
    """Shared by the namespaces of one shape, of one tenant with limits or of all without."""
    account: Account
    prefix_mask: int
    """Bitmap of the parts that a hit needs for its whole prefix."""
    windows: tuple[tuple[int, int], ...]
    """(part, chunks): parts that a hit needs only for its last chunks."""
    chunk_bytes: int
    all_parts: int
    published: int = 0
    hit_chunks: int = 0
    missed: int = 0

    def nbytes(self, parts: int) -> int:
        """Bytes of a chunk of which the bitmap `parts` is stored."""
        if parts == self.all_parts:
            return self.chunk_bytes
        return sum(n for part, n in enumerate(self.extent_bytes) if parts >> part & 1)


NAMESPACES_MAX = 4096
"""Per tenant. Each costs memory for as long as the daemon lives; a model needs a handful."""


class Namespaces:
    """By id and by identity. Ids are small, start at 1 and are never used again."""

    def __init__(self) -> None:
        self.by_id: dict[int, KnownNamespace] = {}
        self._by_identity: dict[tuple[str, bytes], KnownNamespace] = {}

    def __iter__(self) -> Iterator[KnownNamespace]:
        return iter(self.by_id.values())

    def of_tenant(self, tenant: str) -> list[KnownNamespace]:
        return [known for known in self if known.tenant == tenant]

    def open(
        self,
        tenant: str,
        namespace: Namespace,
        *,
        shape_of: Callable[[tuple[int, ...]], Shape],
        policy_of: Callable[[Shape, Account], Policy],
        account: Account,
    ) -> tuple[KnownNamespace, str]:
        """The namespace of `tenant`, and a warning if it can never meet one that is known.

        Raises `BusyError` at `NAMESPACES_MAX`.
        """
        digest = namespace.digest(tenant)
        known = self._by_identity.get((tenant, digest))
        if known is not None:
            return known, ""
        if len(self.of_tenant(tenant)) >= NAMESPACES_MAX:
            raise BusyError(
                f"tenant {tenant!r} has opened {NAMESPACES_MAX} namespaces, which is the limit; "
                "a salt or adapter name per request does not belong into a namespace's identity"
            )
        sizes = tuple(extent_bytes(part) for part in namespace.parts)
        shape = shape_of(sizes)
        chunk, parts = namespace.chunk_tokens, list(enumerate(namespace.parts))
        known = KnownNamespace(
            id=len(self.by_id) + 1,
            tenant=tenant,
            namespace=namespace,
            digest=digest,
            extent_bytes=sizes,
            shape=shape,
            policy=policy_of(shape, account),
            account=account,
            prefix_mask=sum(1 << i for i, part in parts if part.window is None),
            windows=tuple((i, -(-part.window // chunk)) for i, part in parts if part.window),
            chunk_bytes=sum(sizes),
            all_parts=namespace.all_parts,
        )
        warning = self._near_miss(known)
        self.by_id[known.id] = self._by_identity[tenant, digest] = known
        return known, warning

    def _near_miss(self, new: KnownNamespace) -> str:
        for other in self.of_tenant(new.tenant):
            if other.namespace.without_layout() == new.namespace.without_layout():
                difference = "; ".join(new.namespace.differences(other.namespace))
                return (
                    f"namespace {new.digest.hex()[:16]} can never share KV with "
                    f"{other.digest.hex()[:16]} of the same model (new / known): {difference}"
                )
        return ""
