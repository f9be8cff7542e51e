"""One-sided reads and writes between regions; knows no keys."""
