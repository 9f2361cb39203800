"""Holds the private names of torch that syncbn uses, each in one place, and each with a test; kernels/inductor.py holds
those of Inductor.

tests/test_torch_internals.py fails where a later torch gives one of them another meaning. (Classes of modules, such as
_BatchNorm, are named where they are used.)
"""
