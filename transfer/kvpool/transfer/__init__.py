"""Moving bytes between regions of memory, of this process, this host or another. Knows no keys."""
