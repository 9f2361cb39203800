"""Tells where every rank is, and why the ranks disagree: names, signatures, positions, reports, debug mode."""
