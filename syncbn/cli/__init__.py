"""Holds the commands of python -m syncbn."""
