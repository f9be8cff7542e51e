"""What both sides must agree on: identity, keys, layout, words and frames. All sans-I/O."""
