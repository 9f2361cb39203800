"""python -m syncbn check on several ranks; its command line is in test_testing.py."""

from typing import Any

import pytest
from torch import nn
from voting import Ranks

from syncbn.cli import check


@pytest.mark.two_ranks
def test_ranks_that_drift_apart_do_not_pass(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    original = check.differences

    def differences(*arguments: Any) -> tuple[list[Any], nn.Module]:
        found, trained = original(*arguments)
        if ranks.rank == 1:
            next(trained.parameters()).data.view(-1)[0] += 0.25
        return found, trained

    assert check.check(ranks.device, 1, 4).passed
    monkeypatch.setattr(check, "differences", differences)
    result = check.check(ranks.device, 1, 4)
    assert not result.passed
    assert all(row.error <= row.allowed for row in result.accuracy)
    assert "0.weight: rank" in result.synced
    assert "by up to 0.25" in result.synced
