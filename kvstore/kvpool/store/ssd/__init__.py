"""The SSD tier: chunks that outlive memory and processes."""
