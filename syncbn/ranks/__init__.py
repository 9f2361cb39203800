"""Holds what crosses ranks: process groups, all-reduces, and small texts between ranks."""
