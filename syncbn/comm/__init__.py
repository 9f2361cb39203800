"""Talks between ranks: groups, the all_reduce, and small texts. Knows torch.distributed and nothing of the layer."""
