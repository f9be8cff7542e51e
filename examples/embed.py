"""The whole API on made-up KV: publish, match, pull, grow. Run it; it needs no server."""

import numpy as np

from kvpool.client import Namespace, connect, portable

LAYERS, HEADS, DIM, CHUNK = 4, 2, 64, 64
namespace = Namespace(
    model="made-up",
    revision="1",
    kv_dtype="float32",
    kv_scales="none",
    layout="portable",
    chunk_tokens=CHUNK,
    parts=(portable("all", layers=[f"layer.{i}" for i in range(LAYERS)], kv_heads=HEADS,
                    head_dim=DIM, itemsize=4, tokens=CHUNK),),
    key_scheme="tokens",
    adapter="none",
    rope="default",
    salt="none",
)  # fmt: skip

with connect() as client:  # or connect("unix:/run/user/1000/kvpool/kvpool.sock")
    session = client.open(namespace)
    prompt = list(range(200))  # three full chunks and a tail of 8 tokens
    kv = np.random.default_rng(0).standard_normal((3, LAYERS, HEADS, 2, CHUNK, DIM), np.float32)

    print(session.match(prompt))  # nothing is stored yet
    assert session.publish(prompt, list(kv)).stored

    with session.match([*prompt, 7, 8, 9]) as match:  # a longer prompt with the same beginning
        print(match, "usable:", match.usable_prefix(len(prompt) + 3, block_tokens=16))
        out = np.empty_like(kv)
        pulled = session.pull(match, out)
        assert pulled.ok and np.array_equal(out, kv)
        layer = np.empty((3, HEADS, 2, CHUNK, DIM), np.float32)
        assert session.pull(match, layer, layers=["layer.2"]).ok
        view = session.borrow(match).views[0]  # no copy at all, read-only
        assert np.array_equal(view.view(np.float32).reshape(kv[0].shape), kv[0])
    print(session.explain(prompt)[0].tier)
