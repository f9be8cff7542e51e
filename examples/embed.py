"""The whole API on made-up KV: publish, match, pull, grow. Run it; it needs no server."""

import numpy as np

from kvpool.client import Namespace, connect, portable

LAYERS, CHUNK, SHAPE = [f"layer.{i}" for i in range(4)], 64, (4, 2, 2, 64, 64)
part = portable("all", layers=LAYERS, kv_heads=2, head_dim=64, itemsize=4, tokens=CHUNK)
namespace = Namespace(model="made-up", revision="1", kv_dtype="float32", kv_scales="none",
                      layout="portable", chunk_tokens=CHUNK, parts=(part,), key_scheme="tokens",
                      adapter="none", rope="default", salt="none")  # fmt: skip

with connect() as client:  # or connect("unix:/run/user/1000/kvpool/kvpool.sock")
    session = client.open(namespace)
    prompt = list(range(264))  # four full chunks and a tail of 8 tokens
    kv = np.random.default_rng(0).standard_normal((4, *SHAPE), np.float32)
    assert session.match(prompt).chunks == 0  # nothing is stored yet

    assert session.publish(prompt, list(kv[:3])).stored  # whole chunks at once, or …
    with session.publication(prompt, first=3) as publication:  # … layer by layer, as they come
        for layer, plane in zip(LAYERS, kv[3], strict=True):
            publication.write_layer(0, layer, plane)
        publication.commit()

    with session.match([*prompt, 7, 8, 9]) as match:  # a longer prompt with the same beginning
        print(match, "usable:", match.usable_prefix(len(prompt) + 3, block_tokens=16))
        out = np.empty_like(kv)
        assert session.pull(match, out).ok and np.array_equal(out, kv)
        last = np.empty((1, 1, 2, 2, 16, 64), np.float32)  # of one layer, the last 16 tokens
        assert session.pull(match, last, layers=["layer.2"], tokens=(240, 256)).ok
        assert np.array_equal(last[0, 0], kv[3, 2, :, :, 48:])
        view = session.borrow(match)[0]  # no copy at all, read-only
        assert view.tobytes() == kv[0].tobytes()

    session.hint(prompt, will_continue=0.9, gap_s=20)
    print(session.pin(prompt), session.explain(prompt)[0].tier, client.status()["state"])
