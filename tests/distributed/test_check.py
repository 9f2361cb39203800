"""Catches a `python -m syncbn check` that passes a model that ranks train otherwise than one process.

Its command line is in test_testing.py.
"""

from typing import Any

import pytest
from torch import nn
from voting import Ranks

from syncbn import __main__ as program


@pytest.mark.two_ranks
def test_ranks_that_drift_apart_do_not_pass(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    original = program.differences

    def differences(*arguments: Any) -> tuple[list[Any], nn.Module]:
        found, trained = original(*arguments)
        if ranks.rank == 1:
            next(trained.parameters()).data.view(-1)[0] += 0.25
        return found, trained

    assert program.check(ranks.device)[0]
    monkeypatch.setattr(program, "differences", differences)
    passed, text = program.check(ranks.device)
    assert not passed
    assert all(float(line.split()[2]) < 1e-5 for line in text.splitlines() if line.startswith("float"))
    assert "float64: the ranks have different values of 0.weight\n" in text
