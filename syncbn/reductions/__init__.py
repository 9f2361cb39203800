"""Adds up over ranks: what each pass of a layer does with the payload."""
