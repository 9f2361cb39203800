"""Holds the tools beside the layer: a summary, local noise, checks, uneven inputs, running statistics."""
