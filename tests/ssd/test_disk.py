"""The two disks side by side, the folder around the real one, and how it is measured."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.proto.errors import ConfigError
from kvpool.store.ssd.disk import Disk, ShortReadError
from kvpool.store.ssd.files import Files, data_name
from kvpool.store.ssd.folder import CATALOGUE, IDENTITY, LOCK, Folder, Identity
from kvpool.store.ssd.opening import open_folder
from kvpool.store.ssd.probe import measure
from kvpool.store.ssd.simulated import SimulatedDisk
from kvpool.transfer.copying import Bytes

BLOCK = 4096
FILE = 64 * BLOCK
MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture(params=["simulated", "buffered", "direct"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "simulated":
        yield SimulatedDisk(2 * FILE, BLOCK)
        return
    folder = Folder(str(tmp_path / "tier"))
    files = Files(folder, 2, FILE, BLOCK, direct=request.param == "direct")
    yield files
    files.close()
    folder.close()


@pytest.mark.parametrize("nbytes", [1, BLOCK - 1, BLOCK, BLOCK + 1, 17 * BLOCK + 5, FILE])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_bytes_of_any_length_in_any_memory_come_back(disk: Disk, nbytes: int, shift: int) -> None:
    source, target = noise(nbytes + shift)[shift:], np.zeros(nbytes + shift, np.uint8)[shift:]
    disk.write(FILE, source)
    disk.read(FILE, target)
    assert np.array_equal(source, target)
    disk.sync()
    disk.read(FILE, target)
    assert np.array_equal(source, target)


def test_a_write_leaves_its_neighbours_alone(disk: Disk) -> None:
    for block in (0, 1, 2):
        disk.write(block * BLOCK, noise(BLOCK, block))
    disk.write(BLOCK, noise(100, 9))
    out = np.empty(BLOCK, np.uint8)
    for block in (0, 2):
        disk.read(block * BLOCK, out)
        assert np.array_equal(out, noise(BLOCK, block))


def test_a_working_disk_passes_its_check_and_tells_what_is_free(disk: Disk) -> None:
    disk.check()
    assert disk.free_bytes() > 0


def test_a_crash_leaves_of_unsynced_blocks_the_old_the_new_or_a_part() -> None:
    outcomes = set()
    for seed in range(60):
        disk = SimulatedDisk(FILE, BLOCK)
        disk.write(0, np.full(2 * BLOCK, 1, np.uint8))
        disk.sync()
        disk.write(0, np.full(2 * BLOCK, 2, np.uint8))
        left = disk.after_crash(random.Random(seed)).durable
        for block in (left[:BLOCK], left[BLOCK : 2 * BLOCK]):
            kinds = {int(byte) for byte in block}
            outcomes.add("torn" if len(kinds) > 1 else {1: "old", 2: "new"}[kinds.pop()])
    assert outcomes == {"old", "new", "torn"}


def test_a_file_that_was_cut_reads_short_not_as_a_failing_device(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    files = Files(folder, 1, FILE, BLOCK, direct=False)
    os.truncate(folder.path / data_name(0), 2 * BLOCK)
    with pytest.raises(ShortReadError):
        files.read(BLOCK, np.empty(2 * BLOCK, np.uint8))
    files.close()
    folder.close()


# ---- the folder


def test_the_folder_and_all_in_it_are_private(tmp_path: Path) -> None:
    opened = open_folder(str(tmp_path / "a" / "tier"), MIB, 100)
    path = opened.folder.path
    assert os.stat(path).st_mode & 0o777 == 0o700
    names = set(opened.folder.names())
    assert names == {IDENTITY, LOCK, CATALOGUE, data_name(0)}
    assert {os.stat(path / name).st_mode & 0o777 for name in names} == {0o600}
    opened.close()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Folder(str(tmp_path / "tier"))


def test_a_symlink_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "tier").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Folder(str(tmp_path / "tier"))


@pytest.mark.parametrize("name", [data_name(0), CATALOGUE, IDENTITY, LOCK])
def test_a_symlink_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    open_folder(str(tmp_path / "tier"), MIB, 100).close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "tier" / name).unlink()
    (tmp_path / "tier" / name).symlink_to(victim)
    with pytest.raises(ConfigError, match="symlink"):
        open_folder(str(tmp_path / "tier"), MIB, 100)
    assert victim.read_bytes() == b"precious"


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    script = (
        "import sys; from kvpool.store.ssd.folder import Folder\n"
        "from kvpool.proto.errors import ConfigError\n"
        "try: Folder(sys.argv[1])\n"
        "except ConfigError as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tier")]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"is in use by process {os.getpid()}" in answer.stdout
    folder.close()
    Folder(str(tmp_path / "tier")).close()


def test_a_folder_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    open_folder(str(tmp_path / "tier"), MIB, 100).close()
    identity = tmp_path / "tier" / IDENTITY
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ConfigError, match="format 99, this version reads 1"):
        open_folder(str(tmp_path / "tier"), MIB, 100)


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o700)
    (tmp_path / "tier" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds 'thesis.txt' but no IDENTITY"):
        open_folder(str(tmp_path / "tier"), MIB, 100)
    assert (tmp_path / "tier" / "thesis.txt").read_text() == "precious"


def test_a_start_that_was_interrupted_is_started_again(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    os.close(folder.open(f"{IDENTITY}.new"))
    os.close(folder.open("scratch"))
    folder.close()
    open_folder(str(tmp_path / "tier"), MIB, 100).close()


def test_an_identity_survives_its_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    assert folder.identity() is None
    identity = Identity(MIB, MIB // 8, BLOCK, "ab")
    folder.set_identity(identity)
    assert folder.identity() == identity
    folder.close()


# ---- capacity


def test_a_capacity_beyond_the_file_system_is_refused_with_figures_and_takes_nothing(
    tmp_path: Path,
) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ConfigError, match=r"needs \d+ more bytes, but .* only \d+ left"):
        open_folder(str(tmp_path / "tier"), 2 * free, 100)
    assert data_name(0) not in os.listdir(tmp_path / "tier")
    opened = open_folder(str(tmp_path / "tier"), MIB, 100)  # a smaller one is welcome
    assert opened.capacity_bytes == MIB
    opened.close()


def test_space_is_taken_at_the_start(tmp_path: Path) -> None:
    opened = open_folder(str(tmp_path / "tier"), 2 * MIB, 100)
    assert os.stat(opened.folder.path / data_name(0)).st_blocks * 512 >= 2 * MIB
    opened.close()


def test_the_capacity_may_grow_and_shrink_by_whole_files(tmp_path: Path) -> None:
    path = str(tmp_path / "tier")
    open_folder(path, MIB, 100).close()
    grown = open_folder(path, 3 * MIB, 100)
    assert grown.count == 3
    grown.close()
    shrunk = open_folder(path, 2 * MIB, 100)
    assert shrunk.count == 2 and data_name(2) not in shrunk.folder.names()
    shrunk.close()
    with pytest.raises(ConfigError, match="less than one of the files"):
        (tmp_path / "tier" / IDENTITY).write_text(
            (tmp_path / "tier" / IDENTITY).read_text().replace(str(MIB), str(8 * MIB))
        )
        open_folder(path, 2 * MIB, 100)


# ---- measurement


def test_the_measurement_shows_its_figures_and_leaves_nothing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "tier"))
    access = measure(folder)
    assert access.buffered_bytes_s > 0 and access.reason
    assert access.block_bytes % os.sysconf("SC_PAGE_SIZE") == 0
    assert access.direct == (access.direct_bytes_s >= 0.5 * access.buffered_bytes_s)
    assert folder.names() == [LOCK]
    folder.close()


def test_a_file_system_without_direct_io_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "tier"))
    opening = folder.open

    def refuse_direct(name: str, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opening(name, flags)

    monkeypatch.setattr(folder, "open", refuse_direct)
    access = measure(folder)
    assert not access.direct and access.direct_bytes_s == 0
    assert access.reason == "the file system has no direct I/O"
    folder.close()
