"""The errors: one flat family with stable codes, each saying whose fault it is."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest

from kvpool.proto import errors
from kvpool.proto.errors import BY_CODE, InternalError, KvpoolError, UnreachableError, from_code
from kvpool.proto.outcomes import Outcome, Reason

FROZEN = {
    1: ("InvalidError", "yours"),
    2: ("ConfigError", "yours"),
    3: ("DeniedError", "yours"),
    4: ("NamespaceError", "yours"),
    5: ("ProtocolError", "theirs"),
    6: ("VersionError", "theirs"),
    7: ("UnreachableError", "theirs"),
    8: ("DeadlineError", "theirs"),
    9: ("BusyError", "theirs"),
    10: ("TooLargeError", "yours"),
    11: ("StaleError", "theirs"),
    12: ("InternalError", "theirs"),
}
"""The codes are on the wire: add to this table, never change it."""
OUTCOMES = """
    HIT MISS OK EXISTS WRITING NO_PARENT EXPIRED CORRUPT BUSY TOO_LARGE TOO_SMALL UNREACHABLE
    STALE_EPOCH DENIED INVALID
"""
REASONS = """
    UNKNOWN NEVER_STORED EVICTED DELETED OTHER_NAMESPACE BEHIND_GAP BEING_WRITTEN PART_MISSING
    QUARANTINED ORPHAN SLOW_TIER
"""


def family() -> list[type[KvpoolError]]:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    return [cls for cls in classes if issubclass(cls, KvpoolError) and cls is not KvpoolError]


def test_codes_and_faults_are_stable() -> None:
    table = {code: (kind.__name__, kind.fault) for code, kind in BY_CODE.items()}
    assert FROZEN.items() <= table.items()
    assert all(table[code] == FROZEN.get(code, table[code]) for code in table)


def test_every_error_has_a_code_of_its_own_and_is_found_by_it() -> None:
    assert sorted(kind.code for kind in family()) == sorted(BY_CODE)
    assert all(BY_CODE[kind.code] is kind for kind in family())
    assert KvpoolError.code not in BY_CODE


def test_the_family_is_flat_but_for_the_deadline_that_passed() -> None:
    parents = {kind.__name__: kind.__bases__ for kind in family()}
    assert parents.pop("DeadlineError") == (UnreachableError,)
    assert set(parents.values()) == {(KvpoolError,)}


@pytest.mark.parametrize("kind", family(), ids=lambda kind: kind.__name__)
def test_each_error_says_whose_fault_it_is_and_what_it_means(kind: type[KvpoolError]) -> None:
    assert kind.fault in ("yours", "theirs")
    assert kind.__doc__


@pytest.mark.parametrize("kind", family(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_the_wire_and_is_copied_whole(kind: type[KvpoolError]) -> None:
    for error in (from_code(kind.code, "why"), copy.copy(kind("why"))):
        assert type(error) is kind
        assert str(error) == "why"


@pytest.mark.parametrize("code", sorted({0, 13, 2**32 - 1, -1} - set(BY_CODE)))
def test_a_code_that_only_a_newer_peer_knows_is_internal_and_keeps_its_text(code: int) -> None:
    error = from_code(code, "why")
    assert type(error) is InternalError
    assert str(error) == "why"


def test_the_numbers_of_outcomes_and_reasons_are_stable() -> None:
    for kind, names in ((Outcome, OUTCOMES.split()), (Reason, REASONS.split())):
        assert [kind(number).name for number in range(len(names))] == names


@pytest.mark.parametrize("number", [200, 255, 2**32 - 1, -1, np.uint8(200)])
def test_an_unknown_outcome_is_a_miss_and_an_unknown_reason_is_unknown(number: int) -> None:
    assert Outcome(number) is Outcome.MISS
    assert Reason(number) is Reason.UNKNOWN


def test_what_is_no_number_is_no_outcome() -> None:
    text: Any = "HIT"
    with pytest.raises(ValueError, match="HIT"):
        Outcome(text)
