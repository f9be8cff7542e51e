"""Identity and formats are frozen: the same bytes in every process, interpreter and version.

Each frozen value is computed a second time in this file, with nothing but hashlib, struct and
xxhash. A change that alters one is a new namespace prefix, key scheme or chunk version.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import xxhash

from kvpool.proto.namespace import Namespace
from tests.proto import samples

REPOSITORY = Path(__file__).resolve().parents[2]
FROZEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<I", len(raw)) + raw


def encoded_parts(namespace: Namespace) -> bytes:
    out = struct.pack("<I", len(namespace.parts))
    for part in namespace.parts:
        out += text(part.name) + struct.pack("<I", len(part.planes))
        for plane in part.planes:
            out += text(plane.name) + struct.pack("<QQ", plane.nbytes, plane.runs)
        out += struct.pack("<Q", part.window or 0)
    return out


def digest(namespace: Namespace, tenant: str) -> bytes:
    n = namespace
    return hashlib.sha256(
        b"kvpool/namespace/1"
        + text(tenant)
        + b"".join(map(text, (n.model, n.revision, n.kv_dtype, n.kv_scales, n.layout)))
        + struct.pack("<Q", n.chunk_tokens)
        + encoded_parts(n)
        + b"".join(map(text, (n.key_scheme, n.adapter, n.rope, n.salt)))
    ).digest()


def layout_id(namespace: Namespace) -> int:
    encoded = text(namespace.layout) + struct.pack("<Q", namespace.chunk_tokens)
    first = hashlib.sha256(encoded + encoded_parts(namespace)).digest()[:8]
    return int(struct.unpack("<Q", first)[0])


def chain(root: bytes, extras_of_chunk_1: bytes = b"") -> bytes:
    out, previous = b"", root
    for i in range(3):
        body = struct.pack("<4I", *samples.TOKENS[4 * i : 4 * i + 4])
        previous = hashlib.sha256(previous + body + (extras_of_chunk_1 if i == 1 else b"")).digest()
        out += previous
    return out


def prologue(root: bytes, key: bytes) -> bytes:
    # 2 planes of 2 heads x K, V x 4 tokens x 8 x 2 bytes
    planes = [samples.payload()[:256].tobytes(), samples.payload()[256:].tobytes()]
    seed = struct.unpack("<Q", key[:8])[0] ^ 0x9E3779B97F4A7C15
    head = b"KVPOOL\r\n" + struct.pack("<HHI", 1, 0, 2) + root[:24] + key
    head += struct.pack("<QQQQ", 7, 512, layout_id(samples.PORTABLE), 0)
    assert len(head) == 104
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + bytes(16)
    sums = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(p, seed)) for p in planes)
    return (head + sums).ljust(192, b"\0")


def independent() -> dict[str, object]:
    portable, native = digest(samples.PORTABLE, "default"), digest(samples.NATIVE, "tenant-2")
    extras = struct.pack("<II", 0, 1) + b"\xbb" + struct.pack("<II", 1, 32) + b"\xaa" * 32
    return {
        "portable digest": portable.hex(),
        "portable layout id": layout_id(samples.PORTABLE),
        "native digest": native.hex(),
        "native layout id": layout_id(samples.NATIVE),
        "chain": chain(portable).hex(),
        "chain with extras": chain(portable, extras).hex(),
        "foreign": b"".join(hashlib.sha256(native + p).digest() for p in samples.PAGES).hex(),
        "prologue": prologue(portable, chain(portable)[:32]).hex(),
    }


@pytest.mark.parametrize("name", FROZEN)
def test_the_frozen_values_are_what_the_documentation_says(name: str) -> None:
    assert independent()[name] == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
def test_the_code_computes_the_frozen_values(name: str) -> None:
    assert samples.computed()[name] == FROZEN[name]


def test_every_computed_value_is_frozen() -> None:
    assert samples.computed().keys() == independent().keys() == FROZEN.keys()


@cache
def interpreters() -> tuple[str, ...]:
    """This Python and others of the machine that have what kvpool needs."""

    def usable() -> Iterator[str]:
        yield sys.executable
        for minor in range(11, 16):
            path = shutil.which(f"python3.{minor}")
            if path is None or minor == sys.version_info.minor:
                continue
            probe = [path, "-c", "import google.protobuf, numpy, xxhash"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                yield path

    return tuple(usable())


@pytest.mark.parametrize(
    ("seed", "method"),
    [
        (None, "direct"),
        ("0", "direct"),
        ("1", "direct"),
        ("random", "direct"),
        ("random", "fork"),
        ("random", "spawn"),
    ],
)
def test_other_processes_compute_the_frozen_values(seed: str | None, method: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    for python in interpreters():
        command = [python, "-m", "tests.proto.samples", method]
        output = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert output.returncode == 0, output.stderr
        assert json.loads(output.stdout) == FROZEN, python
