"""Adapters that let inference engines use the store: thin, they translate and the client works.

Each module imports its own engine's library, and nothing else here imports the module.
"""
