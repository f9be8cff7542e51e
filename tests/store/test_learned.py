"""What policies learned outlives a store; what cannot be read is no reason not to start."""

from __future__ import annotations

import os
import random
import stat
from functools import cache
from pathlib import Path

import pytest

from kvpool.store.learned import LearnedFile, decode, encode
from kvpool.store.store import Store
from tests.store.daemons import Client, running
from tests.store.world import World, chain, part

CHUNK = 4096
WHOLE = part("all", CHUNK)
DOMAINS = {"local": {"phz/4096/": b'{"format": 1}'}, "other": {}}


@cache
def experienced() -> Store:
    """A store whose policy has seen enough to be trusted."""
    world = World(segments=16)
    known, session = world.open(WHOLE), world.session()
    draw = random.Random(3)
    for _ in range(4000):
        keys = chain(str(int(100 * draw.random() ** 2)), draw.randint(1, 3))
        found = world.pull(session, known, keys)
        if found < len(keys):
            world.publish(session, known, keys[found:], keys[found - 1] if found else b"")
    [policy] = world.store.policies.values()
    assert policy.statistics()["learned"] > 300 and policy.statistics()["trusted"] == 1
    return world.store


def test_a_store_starts_from_what_an_earlier_one_learned() -> None:
    learned = experienced().learned()
    world = World(learned=learned)
    world.open(WHOLE)
    [policy] = world.store.policies.values()
    assert policy.statistics()["trusted"] == 1 and policy.statistics()["learned"] > 300
    world.store.check_integrity()


def test_what_no_policy_has_asked_for_yet_is_kept_for_the_next_life() -> None:
    learned = experienced().learned()
    assert World(learned=learned).store.learned() == learned


def test_a_policy_that_has_seen_little_leaves_nothing() -> None:
    world = World()
    world.publish(world.session(), world.open(WHOLE), chain("x", 2))
    assert world.store.learned() == {}


def test_tables_of_no_use_are_counted_and_the_policy_starts_anew() -> None:
    world = World(learned={f"phz/{CHUNK}/": b'{"format": 99}'})
    known = world.open(WHOLE)
    world.publish(world.session(), known, chain("x", 2))
    assert world.store.counters.ignored_experience == 1


def test_a_file_gives_back_what_it_was_given_and_only_its_owner_may_read_it(
    tmp_path: Path,
) -> None:
    file = LearnedFile(str(tmp_path / "learned"))
    file.save(DOMAINS)
    file.save(DOMAINS)
    assert file.load() == DOMAINS and file.ignored == 0
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["learned"]


def test_nothing_is_written_where_nothing_was_learned_or_kept(tmp_path: Path) -> None:
    LearnedFile(str(tmp_path / "learned")).save({"local": {}})
    LearnedFile("").save(DOMAINS)
    assert os.listdir(tmp_path) == [] and LearnedFile("").load() == {}


def test_without_a_file_there_is_nothing_and_nothing_to_complain_of(tmp_path: Path) -> None:
    file = LearnedFile(str(tmp_path / "learned"))
    assert file.load() == {} and file.ignored == 0


@pytest.mark.parametrize("at", [0, 10, 64, 70, -1])
def test_a_flipped_bit_anywhere_is_noticed(at: int) -> None:
    content = bytearray(encode(DOMAINS))
    content[at] ^= 1
    with pytest.raises(ValueError):
        decode(bytes(content))


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00" * 100, b"{}", encode(DOMAINS)[:-1]])
def test_a_foreign_or_cut_file_is_ignored_and_counted(tmp_path: Path, content: bytes) -> None:
    file = LearnedFile(str(tmp_path / "learned"))
    Path(file.path).write_bytes(content)
    assert file.load() == {} and file.ignored == 1


def test_a_link_or_a_folder_in_its_place_is_ignored_and_counted(tmp_path: Path) -> None:
    LearnedFile(str(tmp_path / "real")).save(DOMAINS)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        file = LearnedFile(str(tmp_path / name))
        assert file.load() == {} and file.ignored == 1


def test_a_daemon_keeps_what_was_learned_beside_its_socket(tmp_path: Path) -> None:
    file = LearnedFile(str(tmp_path / "k.sock.learned"))
    file.save(DOMAINS)
    with running(tmp_path) as daemon:
        Path(file.path).unlink()
        assert daemon.stop() == 0
    assert file.load() == {"local": DOMAINS["local"]}


def test_a_damaged_file_keeps_no_daemon_from_starting_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tables"
    path.write_bytes(b"garbage")
    with running(tmp_path, "--learned", str(path)) as daemon, Client(daemon.address) as client:
        assert client.status()["ignored_learned_files"] == 1
        assert "is ignored" in daemon.log.read_text()
