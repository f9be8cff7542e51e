"""One flat family of errors. Each says whose fault it is and what to do about it.

A *fault* is ``"yours"`` when the caller can avoid the error by calling differently and
``"theirs"`` when the other side (daemon, peer, network, machine) failed. Per-key answers are
never exceptions: they are outcomes (`kvpool.proto.outcomes`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["yours", "theirs"]


class KvpoolError(Exception):
    """Base of every error that kvpool raises on purpose."""

    fault: ClassVar[Fault] = "theirs"
    code: ClassVar[int] = 0


class InvalidError(KvpoolError):
    """A value that can never be right; the text names the value and the accepted ones."""

    fault = "yours"
    code = 1


class ConfigError(KvpoolError):
    """A configuration key or value is unknown or impossible."""

    fault = "yours"
    code = 2


class DeniedError(KvpoolError):
    """The credential does not allow this. Present the right token or ask the operator."""

    fault = "yours"
    code = 3


class NamespaceError(KvpoolError):
    """The namespace differs from what the other side expects; the text shows both."""

    fault = "yours"
    code = 4


class ProtocolError(KvpoolError):
    """The peer sent bytes that are no valid frame, or a message out of turn."""

    fault = "theirs"
    code = 5


class VersionError(KvpoolError):
    """No protocol version is common to both sides; the text shows both ranges."""

    fault = "theirs"
    code = 6


class UnreachableError(KvpoolError):
    """The daemon or peer does not answer. Go on without the store; it reconnects by itself."""

    fault = "theirs"
    code = 7


class DeadlineError(UnreachableError):
    """No answer came before the deadline. A late answer is dropped."""

    code = 8


class BusyError(KvpoolError):
    """No room now; the text carries total, pinned, leased, evictable and quarantined bytes."""

    fault = "theirs"
    code = 9


class TooLargeError(KvpoolError):
    """One object exceeds a limit; the text names the limit and the setting behind it."""

    fault = "yours"
    code = 10


class StaleError(KvpoolError):
    """The handle belongs to an earlier life of the daemon or of this connection. Match again."""

    fault = "theirs"
    code = 11


class InternalError(KvpoolError):
    """The other side failed in a way that it did not expect. Its log has the details."""

    fault = "theirs"
    code = 12


BY_CODE: dict[int, type[KvpoolError]] = {
    kind.code: kind
    for kind in (
        InvalidError,
        ConfigError,
        DeniedError,
        NamespaceError,
        ProtocolError,
        VersionError,
        UnreachableError,
        DeadlineError,
        BusyError,
        TooLargeError,
        StaleError,
        InternalError,
    )
}


def from_code(code: int, text: str) -> KvpoolError:
    """The error that a peer reported; an unknown (newer) code becomes `InternalError`."""
    return BY_CODE.get(code, InternalError)(text)
