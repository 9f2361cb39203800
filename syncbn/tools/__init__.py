"""Holds what users call beside the layer: a summary, checks, uneven inputs, running statistics."""
