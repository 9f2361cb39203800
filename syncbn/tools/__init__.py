"""Holds what users call beside the layer: a summary, local noise, checks, uneven inputs, running statistics."""
