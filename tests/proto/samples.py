"""Samples whose bytes are frozen, and a way to compute them in other processes.

python -m tests.proto.samples direct|fork|spawn      prints the computed values as JSON
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from itertools import pairwise
from typing import Any

import numpy as np

from kvpool.proto import chunk, keys, layout
from kvpool.proto.namespace import Namespace

TENANT = "default"

PORTABLE = Namespace(
    model="org/model-é",
    revision="0123456789abcdef",
    kv_dtype="bfloat16",
    kv_scales="none",
    layout="portable",
    chunk_tokens=4,
    parts=(
        layout.portable("tp0", layers=("l0", "l1"), kv_heads=2, head_dim=8, itemsize=2, tokens=4),
        layout.Part("state", (layout.Plane("conv", 24, 0), layout.Plane("ssm", 40, 0)), window=4),
    ),
    key_scheme="tokens",
    adapter="none",
    rope="theta=10000",
    salt="none",
)
NATIVE = Namespace(
    model="m",
    revision="r",
    kv_dtype="fp8_e4m3",
    kv_scales="sha256:ab",
    layout="native:engine-NHD",
    chunk_tokens=256,
    parts=(layout.native("all", layers=("l0",), nbytes=1 << 20, runs=2),),
    key_scheme="foreign:engine.sha256",
    adapter="lora/1",
    rope="yarn",
    salt="s",
)
TOKENS = [0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 151643, 9, 10, 11]
EXTRAS = [keys.Extra(5, b"\xaa" * 32), keys.Extra(4, b"\xbb")]
"""Both start in chunk 1 (of 4 tokens), in no particular order."""
PAGES = [b"\x01" * 8, b"\x02" * 32]


def computed() -> dict[str, Any]:
    """What the code under test makes of the samples."""
    digest = PORTABLE.digest(TENANT)
    chain = keys.chain_keys(digest, TOKENS, 4)
    return {
        "portable digest": digest.hex(),
        "portable layout id": PORTABLE.layout_id,
        "native digest": NATIVE.digest("tenant-2").hex(),
        "native layout id": NATIVE.layout_id,
        "chain": chain.hex(),
        "chain with extras": keys.chain_keys(digest, TOKENS, 4, EXTRAS).hex(),
        "foreign": keys.foreign_keys(NATIVE.digest("tenant-2"), PAGES).hex(),
        "prologue": prologue(chain[:32]).hex(),
    }


def payload() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One chunk of part 0: byte i is i modulo 251."""
    return (np.arange(PORTABLE.parts[0].nbytes) % 251).astype(np.uint8)


def prologue(key: bytes) -> bytes:
    """The prologue of that chunk, written over memory that is not clean."""
    part = PORTABLE.parts[0]
    target = np.full(chunk.prologue_bytes(part), 0xEE, np.uint8)
    chunk.write_prologue(
        target,
        namespace=PORTABLE.digest(TENANT),
        key=key,
        part=0,
        generation=7,
        nbytes=part.nbytes,
        layout_id=PORTABLE.layout_id,
        sums=chunk.plane_sums(payload(), part.offsets(), chunk.sum_seed(key, 0)),
        planes=len(part.planes),
    )
    return target.tobytes()


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """`stream` cut at arbitrary places."""
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


if __name__ == "__main__":
    if (method := sys.argv[1]) == "direct":
        print(json.dumps(computed()))
    else:
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(json.dumps(pool.apply(computed)))
