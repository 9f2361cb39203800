"""The four kernels that touch whole tensors: two reductions and two maps over (outer, channel, inner).

Every module in this folder offers the same four functions; `reference` defines what they compute.
"""

from __future__ import annotations

from syncbn.kernels import reference as reference
