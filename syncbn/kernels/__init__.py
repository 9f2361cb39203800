"""Holds the kernels: two reductions and two maps of whole tensors, with the mathematics of channels inside."""

from syncbn.kernels.select import available as available
