"""An engine in a process of its own, which does what it is told: commands in, events out.

A line of JSON each. The first one says how the engine is made; then ``{"do": method, …}``, and each
is answered by what the method returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


def obey(make: Callable[..., object]) -> None:
    """Runs until standard input ends. `make(**first)` is the engine."""
    # Engines and their libraries print: what they say is no event.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = iter(sys.stdin)
    engine = make(**json.loads(next(lines)))

    def tell(event: Event) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    tell({"ready": True})
    for line in lines:
        command = json.loads(line)
        tell(getattr(engine, command.pop("do"))(**command))
