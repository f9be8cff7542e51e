"""The store: index, eviction, allocator, tiers, service and daemon."""

# `numpy.unique` would import it at its first call: 15 to 20 ms, for which requests would wait.
import numpy.ma as _  # noqa: F401
