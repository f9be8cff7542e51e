"""A client's work in one namespace: its membership on the present connection, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from google.protobuf.message import Message

from kvpool.client.chains import ChainMemo
from kvpool.client.connection import Connection, M
from kvpool.client.core import ClientCore
from kvpool.client.effects import Exclusive, Steps
from kvpool.client.extents import PartFormat
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, InvalidError, UnreachableError
from kvpool.proto.keys import KEY_BYTES, Extra, Tokens, foreign_keys
from kvpool.proto.namespace import Namespace
from kvpool.transfer.copying import Bytes, empty

Prompt = Tokens | Sequence[bytes] | bytes
"""Token ids; page hashes where the key scheme is foreign; or packed keys (n x 32 bytes)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What follows from a namespace and the tenant that the store takes us for."""

    namespace: Namespace
    digest: bytes
    memo: ChainMemo
    formats: tuple[PartFormat, ...]

    @classmethod
    def of(cls, namespace: Namespace, tenant: str) -> Identity:
        digest = namespace.digest(tenant)
        memo = ChainMemo(digest, namespace.chunk_tokens)
        parts = range(len(namespace.parts))
        formats = tuple(PartFormat.of(namespace, digest, i) for i in parts)
        return cls(namespace, digest, memo, formats)

    def keys(self, prompt: Prompt, extras: Sequence[Extra] | None) -> bytes:
        """Packed keys of the full chunks of `prompt`; packed keys are returned as they are."""
        if isinstance(prompt, (bytes, bytearray, memoryview)):
            keys = bytes(prompt)
            if len(keys) % KEY_BYTES:
                raise InvalidError(f"{len(keys)} bytes are no multiple of {KEY_BYTES}-byte keys")
            return keys
        if self.namespace.key_scheme == "tokens":
            return self.memo.keys(cast(Tokens, prompt), extras)
        if extras:
            raise InvalidError("extras belong into the engine's own page hashes")
        return foreign_keys(self.digest, cast(Sequence[bytes], prompt))


@dataclass(frozen=True, slots=True)
class Membership:
    """A namespace opened on a connection; its number means nothing on any other."""

    connection: Connection
    number: int
    identity: Identity

    def ask(self, body: Message, kind: type[M]) -> Steps[M]:
        """See `Connection.ask`."""
        return self.connection.ask(body, kind)


class SessionCore:
    """A client's work in one namespace."""

    def __init__(self, client: ClientCore, namespace: Namespace) -> None:
        self.client = client
        self.namespace = namespace
        self.membership: Membership | None = None
        self.warning = ""
        """Said by the daemon if writers and readers of this model can never meet."""

    # ---- joining

    @property
    def id(self) -> int:
        """Number of the namespace on the present connection; 0 before the store was reached."""
        return self.membership.number if self.membership is not None else 0

    def join(self) -> Steps[None]:
        """Opens the namespace now or, if the store is away, whenever it is next needed.

        Raises what the store has against it.
        """
        try:
            yield from self.joined()
        except (UnreachableError, BusyError):
            return

    @property
    def present(self) -> Membership | None:
        """The membership, if there is one to be used without further ado."""
        membership = self.membership
        if membership is None or membership.connection is not self.client.ready:
            return None
        return membership

    def joined(self) -> Steps[Membership]:
        """The membership on the present connection. Raises what keeps it from being had."""
        membership = self.present
        if membership is not None:
            return membership
        connection = self.client.ready or (yield from self.client.connected())
        membership = self.membership
        if membership is None or membership.connection is not connection:
            yield Exclusive(partial(self._open, connection))
            membership = self.membership
            assert membership is not None
        return membership

    def _open(self, connection: Connection) -> Steps[None]:
        if self.membership is not None and self.membership.connection is connection:
            return
        identity = self._identity(connection.welcome.tenant)
        record = self.namespace.to_record()
        opened = yield from connection.ask(
            wire.Open(namespace=record, digest=identity.digest), wire.Opened
        )
        self.membership = Membership(connection, opened.namespace, identity)
        self.warning = opened.warning

    def _identity(self, tenant: str) -> Identity:
        """The present one if the tenant is still the same: it remembers chains."""
        digest = self.namespace.digest(tenant)
        known = self.membership.identity if self.membership is not None else None
        return known if known and known.digest == digest else Identity.of(self.namespace, tenant)

    def payload(self, chunks: int, part: str | None) -> Bytes:
        """See `Session.payload`."""
        number = self.namespace.part_mask((part,)).bit_length() - 1 if part else 0
        nbytes = self.namespace.parts[number].nbytes
        return empty(chunks * nbytes).reshape(chunks, nbytes)

    # ---- keys

    def keys(self, prompt: Prompt, extras: Sequence[Extra] | None = None) -> bytes:
        """See `Session.keys`."""
        if self.membership is None:
            raise UnreachableError(
                "keys depend on the tenant, which the store has not told this session yet"
            )
        return self.membership.identity.keys(prompt, extras)
