"""Pages that are in use become huge ones; nothing else about memory changes."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.transfer import paging
from kvpool.transfer.paging import HUGE, make_huge
from tests.transfer.pages import ALL, PAGE, kernel_collapses, kilobytes, small_pages


def test_pages_in_use_become_huge_and_keep_their_content() -> None:
    content = np.arange(3 * HUGE // PAGE, dtype=np.uint8)
    memory = small_pages(3, slice(None, None, PAGE), content)
    before = memory.copy()
    make_huge(memory)
    assert kilobytes(memory, "AnonHugePages") == (3 * HUGE // 1024 if kernel_collapses() else 0)
    assert np.array_equal(memory, before)


def test_memory_that_nobody_touched_stays_untaken() -> None:
    memory = small_pages(3, slice(HUGE, HUGE + 1))
    make_huge(memory)
    assert kilobytes(memory, "Rss") == (HUGE // 1024 if kernel_collapses() else PAGE // 1024)


def test_a_part_of_a_huge_page_is_left_as_it_is() -> None:
    memory = small_pages(2, ALL)
    make_huge(memory[PAGE : 2 * HUGE - PAGE])
    assert kilobytes(memory, "AnonHugePages") == 0
    assert memory.min() == 7


def test_views_with_gaps_are_taken_with_their_gaps() -> None:
    memory = small_pages(2, ALL)
    make_huge(memory.reshape(-1, 2 * PAGE)[:, :PAGE])
    # The last gap is no part of the view, and so the last huge page is not whole.
    assert kilobytes(memory, "AnonHugePages") == (HUGE // 1024 if kernel_collapses() else 0)


def test_a_kernel_that_knows_no_such_request_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paging, "_MADV_COLLAPSE", 9999)
    memory = small_pages(1, ALL)
    make_huge(memory)
    assert kilobytes(memory, "AnonHugePages") == 0
    assert memory.min() == 7
