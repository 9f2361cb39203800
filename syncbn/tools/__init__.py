"""Holds the tools beside the layer: a summary, and running statistics of several batches."""
