"""Whether the device works: marked down by an error or a hang, up again when it proves itself."""

from __future__ import annotations

RETRY_S = 1.0
RETRY_S_MAX = 30.0
HANG_S = 10.0
"""Work that takes longer is no slow device any more."""


class Condition:
    """A state machine; `now` is any monotonic clock in seconds."""

    def __init__(self, hang_s: float = HANG_S) -> None:
        self.down = ""
        """Why the tier is down, in words; empty while it works."""
        self.downs = 0
        """How often it went down."""
        self._hang_s = hang_s
        self._since: dict[int, float] = {}
        self._next = 0
        self._retry_at = 0.0
        self._wait_s = RETRY_S
        self._checking = False

    @property
    def in_flight(self) -> int:
        return len(self._since)

    def started(self, now: float) -> int:
        """Work begins to wait for the device; returns its ticket."""
        self._next += 1
        self._since[self._next] = now
        return self._next

    def ended(self, ticket: int) -> None:
        del self._since[ticket]

    def failed(self, text: str, now: float) -> None:
        """The device gave an error."""
        if not self.down:
            self.downs += 1
            self._wait_s = RETRY_S
        self.down = text
        self._retry_at = now + self._wait_s

    def wants_check(self, now: float) -> bool:
        """Whether the device should be asked to prove itself now; notices hangs."""
        hung = self._hung(now)
        if hung and not self.down:
            self.failed(f"no answer from the device for {hung:.0f} s", now)
        if not self.down or self._checking or hung or now < self._retry_at:
            return False
        self._checking = True
        return True

    def checked(self, error: Exception | None, now: float) -> bool:
        """The answer to `wants_check`. True if the tier is up again."""
        self._checking = False
        if error is None:
            self.down = ""
            return True
        self._wait_s = min(2 * self._wait_s, RETRY_S_MAX)
        self.failed(str(error), now)
        return False

    def _hung(self, now: float) -> float:
        """How long the oldest work has waited, if that is too long, else 0."""
        oldest = next(iter(self._since.values()), now)
        return now - oldest if now - oldest > self._hang_s else 0.0
