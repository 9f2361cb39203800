"""Tells where every rank is, and why the ranks disagree: call sites, signatures, positions, reports, debug mode."""
