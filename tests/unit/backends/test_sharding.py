from __future__ import annotations

from pathlib import Path

import pytest
import torch

from search_r1.backends.model import load_trainable_lm
from search_r1.backends.sharding import give_room
from search_r1.config import LoraConfig, ModelConfig
from tests.model_factory import ARCHITECTURES, tiny_model_dir


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_made_without_weights_is_like_the_loaded_one(
    tmp_path: Path, architecture: str, tied: bool, rank: int
) -> None:
    path, config = str(tiny_model_dir(tmp_path, architecture, tied=tied)), ModelConfig(lora=LoraConfig(rank=rank))
    loaded = load_trainable_lm(path, config, "cpu")
    (tmp_path / "model.safetensors").unlink()
    empty = load_trainable_lm(path, config, "cpu", empty=True)
    assert all(parameter.is_meta for name, parameter in empty.named_parameters() if "lora" not in name)
    give_room(empty, torch.device("cpu"))
    for made, expected in (
        (empty.named_parameters(), loaded.named_parameters()),
        (empty.named_buffers(), loaded.named_buffers()),
    ):
        assert [(name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for name, tensor in made] == [
            (name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for name, tensor in expected
        ]
    assert (empty.get_input_embeddings().weight is empty.get_output_embeddings().weight) == tied
    assert empty.state_dict().keys() == loaded.state_dict().keys()


def test_room_is_given_to_what_has_none_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    first = model[0].weight
    give_room(model, torch.device("cpu"))
    assert model[0].weight is first
    assert not model[1].weight.is_meta
