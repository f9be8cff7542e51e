"""What `kvpool bench engine` makes of its samples."""

from __future__ import annotations

from kvpool.bench.engines import Sample, rows


def test_a_case_is_compared_with_its_yardstick_pair_by_pair() -> None:
    """The machine becomes slower by far more than a hit costs; each hit still costs 5 ms."""
    samples = []
    for pair in range(25):
        times = [("local hit", 100.0 * pair), ("hit", 100.0 * pair + 5)]
        samples += [Sample(512, case, ms) for case, ms in times[:: -1 if pair % 2 else 1]]
    local, hit = rows("vllm", iter(samples))
    assert (hit["case"], hit["pairs"], hit["ttft_ms_p50"]) == ("hit", 25, 1205)
    assert (hit["above_ms"], hit["above_ms_95"]) == (5, "5 to 5")
    assert (local["case"], local["ttft_ms_p50"], local["above_ms"]) == ("local hit", 1200, None)


def test_the_interval_of_a_median_difference_holds_the_middle_of_the_pairs() -> None:
    """Of 100 differences from the 40th to the 61st: fewer than 40 of 100 fair coins are rare."""
    samples = []
    for pair in range(100):
        samples += [Sample(512, "no store", 1000.0), Sample(512, "miss", 1000.0 + pair)]
    _, miss = rows("hf", iter(samples))
    assert (miss["above_ms"], miss["above_ms_95"]) == (49.5, "39 to 60")
