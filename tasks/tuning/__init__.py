"""Tuning on public rows: which clipping norm, noise, batch size and learning rate, before any private row is read."""
