"""The commands of python -m syncbn."""
