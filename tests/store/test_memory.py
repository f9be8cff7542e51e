"""How much memory may be taken, on made-up trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.proto.errors import InternalError
from kvpool.store.memory import AvailableMemory, available_bytes, read_file, return_freed

GIB = 1 << 30
V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"


def machine(gib: float) -> dict[str, str]:
    kib = int(gib * (1 << 20))
    return {"/proc/meminfo": f"MemTotal:       {2 * kib} kB\nMemAvailable:   {kib} kB\n"}


def v2(folder: str, limit: int | str, current: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{V2}{folder}/memory.max": f"{limit}\n",
        f"{V2}{folder}/memory.current": f"{current}\n",
        f"{V2}{folder}/memory.stat": f"anon 77\nfile 99\ninactive_file {cache}\nactive_file 5\n",
    }


def v1(folder: str, limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{V1}{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{V1}{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{V1}{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}\n",
    }


def ask(tree: dict[str, str], headroom: int = 0) -> AvailableMemory:
    return available_bytes(headroom, tree.get)


def test_without_cgroups_the_machine_decides() -> None:
    expected = AvailableMemory(3 * GIB, "MemAvailable of /proc/meminfo")
    assert ask(machine(3)) == expected
    assert ask(machine(3) | {"/proc/self/cgroup": "0::/\n"}) == expected


def test_a_limit_of_the_own_cgroup_decides_if_it_leaves_less() -> None:
    tree = machine(8) | {"/proc/self/cgroup": "0::/serving/kv\n"}
    tree |= v2("/serving/kv", 4 * GIB, GIB)
    assert ask(tree) == AvailableMemory(3 * GIB, f"memory.max of {V2}/serving/kv")
    assert ask(tree | machine(2)).source == "MemAvailable of /proc/meminfo"


def test_the_tightest_of_all_cgroups_above_decides() -> None:
    tree = machine(64) | {"/proc/self/cgroup": "0::/a/b/c\n"}
    tree |= v2("/a/b/c", "max", GIB) | v2("/a/b", 20 * GIB, 2 * GIB) | v2("/a", 30 * GIB, 29 * GIB)
    tree |= v2("/other", GIB, GIB)
    assert ask(tree) == AvailableMemory(GIB, f"memory.max of {V2}/a")


def test_no_limit_is_no_limit() -> None:
    tree = machine(2) | {"/proc/self/cgroup": "0::/a\n"} | v2("/a", "max", 7 * GIB)
    assert ask(tree).available_bytes == 2 * GIB


def test_in_a_container_the_mount_point_is_the_own_cgroup() -> None:
    """The path is the host's, and what lies above the container is not mounted."""
    tree = machine(8) | {"/proc/self/cgroup": "0::/docker/abc\n"} | v2("", 2 * GIB, GIB)
    assert ask(tree) == AvailableMemory(GIB, f"memory.max of {V2}")
    tree["/proc/self/cgroup"] = "0::/\n"
    assert ask(tree) == AvailableMemory(GIB, f"memory.max of {V2}")


def test_page_cache_that_can_go_counts_as_available() -> None:
    tree = machine(64) | {"/proc/self/cgroup": "0::/a\n"}
    assert ask(tree | v2("/a", 8 * GIB, 8 * GIB, cache=5 * GIB)).available_bytes == 5 * GIB


def test_version_1_is_understood_and_its_huge_default_is_no_limit() -> None:
    tree = machine(64) | {"/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slice/kv\n0::/\n"}
    tree |= v1("", 9223372036854771712, 50 * GIB) | v1("/slice", 10 * GIB, 8 * GIB, cache=GIB)
    assert ask(tree) == AvailableMemory(3 * GIB, f"memory.limit_in_bytes of {V1}/slice")
    tree |= v1("/slice/kv", GIB, GIB // 2)
    assert ask(tree) == AvailableMemory(GIB // 2, f"memory.limit_in_bytes of {V1}/slice/kv")


def test_headroom_is_left_alone_and_the_figure_never_falls_below_nothing() -> None:
    assert ask(machine(3), headroom=GIB).available_bytes == 2 * GIB
    assert ask(machine(3), headroom=4 * GIB).available_bytes == 0
    tree = machine(3) | {"/proc/self/cgroup": "0::/a\n"} | v2("/a", GIB, 2 * GIB)
    assert ask(tree) == AvailableMemory(0, f"memory.max of {V2}/a")


@pytest.mark.parametrize(
    "line", ["0::/a/../b", "0::", "", "garbage", "5:memory", "::", "0::/a//", "0::/a\n0::/a"]
)
def test_odd_lines_do_no_harm(line: str) -> None:
    assert ask(machine(3) | {"/proc/self/cgroup": line}).available_bytes == 3 * GIB


def test_odd_figures_do_no_harm() -> None:
    tree = machine(3) | {"/proc/self/cgroup": "0::/a\n"} | v2("/a", "", 1)
    tree |= {f"{V2}/memory.max": "5"}  # without memory.current
    assert ask(tree).available_bytes == 3 * GIB


@pytest.mark.parametrize("meminfo", [None, "", "MemFree: 1 kB\n", "MemAvailable:\n"])
def test_a_system_that_tells_nothing_is_an_error(meminfo: str | None) -> None:
    with pytest.raises(InternalError, match="MemAvailable"):
        available_bytes(0, lambda path: meminfo)


def test_this_machine_has_some_memory_and_says_by_which_file() -> None:
    found = available_bytes()
    assert found.available_bytes > 0
    assert found.source.split(" of ")[1].startswith(("/proc/", "/sys/"))
    assert read_file("/proc/no such file") is None


def test_what_was_freed_below_something_that_lives_goes_back() -> None:
    pieces = [bytes([1]) * 50_000 for _ in range(2000)]  # of the heap, not maps of their own
    last, full = pieces.pop(), resident()
    pieces.clear()
    return_freed()
    assert resident() < full - 50_000_000 and last


def resident() -> int:
    """Bytes of this process's own."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "RssAnon" in line).split()[1]) << 10
