"""Catches memory that is folded to another (outer, channel, inner) than it has, or copied where a view would do."""

import pytest
import torch

from syncbn.kernels.interface import Layout

FOLDS_AS_VIEW = {
    "(N, C)": (torch.empty(5, 3), 1, (5, 3, 1)),
    "(N, C, H, W)": (torch.empty(5, 3, 2, 7), 1, (5, 3, 14)),
    "(N, H, W, C)": (torch.empty(5, 2, 7, 3), 3, (70, 3, 1)),
    "channels_last": (torch.empty(5, 3, 2, 7).to(memory_format=torch.channels_last), 1, (70, 3, 1)),
    "channels_last_3d": (torch.empty(5, 3, 2, 7, 4).to(memory_format=torch.channels_last_3d), 1, (280, 3, 1)),
    "channels in the middle": (torch.empty(5, 2, 3, 7), 2, (10, 3, 7)),
    "channels first of all": (torch.empty(3, 5, 7), 0, (1, 3, 35)),
    "one channel": (torch.empty(5, 1, 2, 7).to(memory_format=torch.channels_last), 1, (5, 1, 14)),
    "no pixels": (torch.empty(5, 3, 0, 7), 1, (5, 3, 0)),
}


@pytest.mark.parametrize(("tensor", "channel_dim", "shape"), FOLDS_AS_VIEW.values(), ids=FOLDS_AS_VIEW)
def test_dense_memory_folds_as_a_view(tensor: torch.Tensor, channel_dim: int, shape: tuple[int, ...]) -> None:
    """As does an output made by empty_like, so kernels can write into it."""
    layout = Layout.of(tensor, channel_dim)
    assert layout.dense(tensor) is tensor
    for dense in (tensor, torch.empty_like(tensor)):
        folded = layout.fold(dense)
        assert folded.shape == shape
        assert folded.is_contiguous()
        assert folded.data_ptr() == dense.data_ptr()


def test_gaps_and_other_layouts_are_copied() -> None:
    base = torch.arange(240.0).view(4, 3, 4, 5)
    for view in (base[:, :, ::2], base[:, :, :1].expand(-1, -1, 3, -1), base.transpose(2, 3)):
        assert torch.equal(Layout.of(view, 1).fold(view), view.contiguous().flatten(2))
    channels_last = Layout.of(base.to(memory_format=torch.channels_last), 1)
    assert torch.equal(channels_last.fold(base), base.movedim(1, -1).reshape(-1, 3, 1))
    assert torch.equal(channels_last.dense(base), base)
