"""The tests of an adapter are collected only where its engine is installed."""

from importlib.util import find_spec

_NEEDS = {"test_hf*.py": "transformers", "test_sglang*.py": "sglang"}

collect_ignore_glob = [pattern for pattern, engine in _NEEDS.items() if find_spec(engine) is None]
