"""Holds the side roads: calls that torch compiles, transforms, watches or traces, and tensors that are not ordinary."""
