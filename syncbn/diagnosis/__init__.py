"""Tells where every rank is, and why the ranks disagree: call sites, positions, waits, reports."""
