"""The store: index, eviction, allocator, tiers, service and daemon."""
