"""What an engine embeds: sessions, publish and pull, the prefix helper."""
