"""Checkpoints from one format into another. The converter is not built yet."""
