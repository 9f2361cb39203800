"""Folding is pure geometry: which memory folds as a view, and to which (outer, channel, inner)."""

import pytest
import torch

from syncbn.layout import Layout

# name: tensor, channel_dim, folded shape
FOLDS_AS_VIEW = {
    "(N, C)": (torch.empty(5, 3), 1, (5, 3, 1)),
    "(N, C, L)": (torch.empty(5, 3, 7), 1, (5, 3, 7)),
    "(N, C, H, W)": (torch.empty(5, 3, 2, 7), 1, (5, 3, 14)),
    "(N, H, W, C)": (torch.empty(5, 2, 7, 3), 3, (70, 3, 1)),
    "channels_last": (torch.empty(5, 3, 2, 7).to(memory_format=torch.channels_last), 1, (70, 3, 1)),
    "channels_last_3d": (torch.empty(5, 3, 2, 7, 4).to(memory_format=torch.channels_last_3d), 1, (280, 3, 1)),
    "channels in the middle": (torch.empty(5, 2, 3, 7), 2, (10, 3, 7)),
    "channels first of all": (torch.empty(3, 5, 7), 0, (1, 3, 35)),
    "six dims": (torch.empty(2, 3, 2, 2, 2, 2), 1, (2, 3, 16)),
    "one channel": (torch.empty(5, 1, 2, 7).to(memory_format=torch.channels_last), 1, (5, 1, 14)),
    "no samples": (torch.empty(0, 3, 2, 7), 1, (0, 3, 14)),
    "no pixels": (torch.empty(5, 3, 0, 7), 1, (5, 3, 0)),
}


@pytest.mark.parametrize(("tensor", "channel_dim", "shape"), FOLDS_AS_VIEW.values(), ids=FOLDS_AS_VIEW)
def test_dense_memory_folds_as_a_view(tensor: torch.Tensor, channel_dim: int, shape: tuple[int, ...]) -> None:
    layout = Layout.of(tensor, channel_dim)
    folded = layout.fold(tensor)
    assert folded.shape == shape
    assert folded.is_contiguous()
    assert folded.data_ptr() == tensor.data_ptr()
    assert layout.dense(tensor) is tensor
    # An output made by empty_like folds to the same shape as a view of itself, so kernels can write into it.
    output = torch.empty_like(tensor)
    layout.fold(output).copy_(torch.arange(tensor.numel()).view(shape))
    assert output.unique().numel() == tensor.numel()
    assert output.stride() == tensor.stride()


def test_gaps_and_other_layouts_are_copied() -> None:
    base = torch.arange(240.0).view(4, 3, 4, 5)
    assert torch.equal(Layout.of(base, 1).fold(base), base.flatten(2))
    for view in (base[:, :, ::2], base[:, :, :1].expand(-1, -1, 3, -1), base.transpose(2, 3)):
        layout = Layout.of(view, 1)
        assert torch.equal(layout.fold(view), view.contiguous().flatten(2))
    channels_last = Layout.of(base.to(memory_format=torch.channels_last), 1)
    assert torch.equal(channels_last.fold(base), base.movedim(1, -1).reshape(-1, 3, 1))
    assert torch.equal(channels_last.dense(base), base)
