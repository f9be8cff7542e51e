"""The prefill speed that publishes show: a bound from below, and of many the lower quartile."""

from __future__ import annotations

import pytest

from kvpool.store.ssd.prefill import OBSERVATIONS_MIN, Prefill


def observe(prefill: Prefill, name: str, seconds: float, chunks: int = 1) -> None:
    key = name.encode()
    prefill.missed(key, 100.0)
    prefill.published(b"", key, key + b"/end", chunks, 100.0 + seconds)


def test_a_few_publishes_tell_nothing_and_enough_tell_the_speed() -> None:
    prefill = Prefill(chunk_tokens=256)
    for number in range(OBSERVATIONS_MIN - 1):
        observe(prefill, str(number), 0.5, chunks=4)
    assert prefill.tokens_s == 0
    observe(prefill, "last", 0.5, chunks=4)
    assert prefill.tokens_s == 4 * 256 / 0.5


def test_of_a_miss_whose_chunks_come_bit_by_bit_the_best_bound_counts() -> None:
    prefill = Prefill(chunk_tokens=10)
    for number in range(OBSERVATIONS_MIN):
        a, b, c, d = (f"{number}{name}".encode() for name in "abcd")
        prefill.missed(a, 0.0)
        prefill.published(b"above", a, a, 1, 2.0)  # 10 tokens in 2 s
        prefill.published(a, b, c, 8, 3.0)  # 90 in 3 s
        prefill.published(c, d, d, 1, 60.0)  # decoded, not prefilled
    assert prefill.tokens_s == 30


def test_a_quarter_of_publishes_that_were_not_computed_changes_nothing() -> None:
    prefill = Prefill(chunk_tokens=100)
    for number in range(32):
        observe(prefill, str(number), 1e-4 if number % 4 == 0 else 1.0)
    assert prefill.tokens_s == pytest.approx(100)


def test_publishes_that_follow_no_miss_or_take_no_time_tell_nothing() -> None:
    prefill = Prefill(chunk_tokens=100)
    for number in range(2 * OBSERVATIONS_MIN):
        prefill.published(b"", str(number).encode(), b"end", 1, 1.0)
        observe(prefill, f"at once {number}", 0.0)
    assert prefill.tokens_s == 0


def test_of_two_that_wait_for_one_chunk_the_first_counts() -> None:
    prefill = Prefill(chunk_tokens=100)
    for number in range(OBSERVATIONS_MIN):
        key = str(number).encode()
        prefill.missed(key, 0.0)
        prefill.missed(key, 0.999)
        prefill.published(b"", key, key, 1, 1.0)
    assert prefill.tokens_s == 100


def test_the_latest_publishes_count() -> None:
    prefill = Prefill(chunk_tokens=100)
    for number in range(100):
        observe(prefill, str(number), 1.0 if number < 60 else 0.1)
    assert prefill.tokens_s == pytest.approx(1000)
