"""A layer that the bridge does not know: its tensors travel whole, through the model's own loader, and are reported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_dapo.models.slices import Slice
from megatron_dapo.resharding.vllm_install import install
from megatron_dapo.resharding.vllm_layout import FULL, checkpoint_shapes, model_layout


class Odd(nn.Module):
    """Stores every second row of its HF tensor, and says so to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded[::2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        self.norm = nn.LayerNorm(4, bias=False)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)


def test_unknown_layers_get_whole_tensors(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(6, 4)
    save_file({"odd.weight": full}, tmp_path / "model.safetensors")
    model = Model()
    layout = model_layout(model, str(tmp_path))
    whole = Slice("odd.weight", (0, 0), (6, 4), FULL + "odd.weight", (0, 0))
    assert layout.slices == (whole, Slice("norm.weight", (0,), (4,), "norm.weight", (0,)))
    assert layout.full == ("odd.weight",)
    received = full.clone()
    install(model, FULL + "odd.weight", received)
    received.zero_()
    assert torch.equal(model.odd.weight, full[::2])


def test_an_unknown_layer_without_a_shape_is_named(tmp_path: Path) -> None:
    checkpoint_shapes.cache_clear()
    with pytest.raises(ValueError, match=r"odd\.weight is of a layer type this bridge does not know"):
        model_layout(Model(), str(tmp_path))
