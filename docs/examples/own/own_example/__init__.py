"""Data and a network of one's own, for remerge."""
