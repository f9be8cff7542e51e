"""What eviction policies learned, in a file that outlives the daemon.

    64 hex digits: SHA-256 of what follows ‖ newline ‖ JSON {"format": 1, "domains": {domain: {…}}}

It is only experience: without it policies start anew. So a file that is damaged, foreign or of
another version is ignored, and it is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvpool.store.eviction.base import Learns, Policy
from kvpool.store.records import Counters

log = logging.getLogger("kvpool")

FORMAT = 1
FILE_BYTES_MAX = 64 << 20

Learned = Mapping[str, bytes]
"""What each policy of one store learned: by the policy's name, shape and owner in memory, by
"ssd", name and shape below it."""


def encode(domains: Mapping[str, Learned]) -> bytes:
    """The file's content."""
    texts = {
        domain: {name: dumped.decode() for name, dumped in learned.items()}
        for domain, learned in domains.items()
    }
    body = json.dumps({"format": FORMAT, "domains": texts}).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(content: bytes) -> dict[str, dict[str, bytes]]:
    """What `encode` was given. `ValueError` for anything else."""
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("damaged, or no file of ours")
    try:
        tables = json.loads(body)
        if tables["format"] != FORMAT:
            raise ValueError(f"of format {tables['format']}, not {FORMAT}")
        return {
            domain: {name: dumped.encode() for name, dumped in learned.items()}
            for domain, learned in tables["domains"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no file of ours: {error!r}") from error


class Lessons:
    """What the policies of one store learned, in this life and in earlier ones, by name."""

    def __init__(self, earlier: Learned, counters: Counters) -> None:
        self._learned = dict(earlier)
        self._counters = counters

    def teach(self, name: str, policy: Policy) -> None:
        """Passes on what a policy of this name learned in an earlier life, if one did."""
        if isinstance(policy, Learns) and name in self._learned:
            try:
                policy.load(self._learned[name])
            except ValueError as error:
                self._counters.ignored_experience += 1
                log.warning("policy %s starts anew, its experience is of no use: %s", name, error)

    def learned(self, policies: Iterable[tuple[str, Policy]]) -> Learned:
        """What these policies know now that can be relied on, and what earlier lives left."""
        for name, policy in policies:
            if isinstance(policy, Learns) and policy.statistics()["trusted"]:
                self._learned[name] = policy.dump()
        return self._learned


class LearnedFile:
    """The file at `path`; empty: none."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ignored = 0
        """Files that were of no use."""

    def load(self) -> dict[str, dict[str, bytes]]:
        """By domain. Whatever the file may be, it keeps no daemon from starting."""
        try:
            return _read(self.path) if self.path else {}
        except (ValueError, OSError) as error:
            self.ignored += 1
            log.warning("%s is ignored, eviction policies start anew: %s", self.path, error)
            return {}

    def save(self, domains: Mapping[str, Learned]) -> None:
        """Replaces the file, readable by us alone; a crash leaves the old or the new one.

        Nothing is written where nothing was learned. Raises `OSError`.
        """
        if not self.path or not any(domains.values()):
            return
        beside = f"{self.path}.new"
        Path(beside).unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(encode(domains))
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, self.path)


def _read(path: str) -> dict[str, dict[str, bytes]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"longer than {FILE_BYTES_MAX} bytes")
    return decode(content)
