"""Tells where every rank is, and why the ranks disagree: names, positions, waits, reports, failures."""
