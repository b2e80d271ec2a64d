"""The story, readable top to bottom, and the `remerge` command."""
