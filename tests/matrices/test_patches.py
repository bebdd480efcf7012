"""Patch embeddings that config.json or the module's name tells of in other words: one matrix, as the model uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import emitted
from tiny_modules import model, randomise
from torch import nn

from shardesd.matrices.towers import Values

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24},
}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "internvl": model("InternVLVision", "InternVLVisionModel", **SIZES, image_size=[8, 8], patch_size=[4, 4]),
    "vivit": model("Vivit", "VivitModel", **SIZES, image_size=8, num_frames=4, tubelet_size=[2, 4, 4]),
    "mgp-str": model("Mgpstr", "MgpstrModel", **{**IMAGE, "image_size": [8, 16]}),
    "vitdet": model("VitDet", "VitDetModel", **IMAGE),
    "flava": model(
        "Flava",
        "FlavaModel",
        hidden_size=32,
        image_config=IMAGE,
        text_config={**SIZES, "vocab_size": 32},
        multimodal_config=SIZES,
    ),
    "pixio": model("Pixio", "PixioModel", **IMAGE),
    "mlcd": model("MLCDVision", "MLCDVisionModel", **IMAGE),
    "aimv2": model("Aimv2Vision", "Aimv2VisionModel", **IMAGE),
    "smolvlm": model("SmolVLMVision", "SmolVLMVisionTransformer", **IMAGE),
    "vjepa2": model(
        "VJEPA2",
        "VJEPA2Model",
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "crop_size": 8},
        **{"tubelet_size": 2, "frames_per_clip": 4, "pred_num_hidden_layers": 1, "pred_hidden_size": 24},
        pred_num_attention_heads=2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_patch_embedding_is_one_matrix(name: str, tmp_path: Path) -> None:
    built = randomise(MODELS[name]())
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    layers = {
        path: layer
        for path, layer in built.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Conv3d) and "embeddings" in path and layer.stride == layer.kernel_size
    }
    assert len(layers) == 1
    for path, layer in layers.items():
        (longname,) = [key for key in found if key.endswith(path)]
        (W,) = found[longname].slices
        x = torch.randn(5, *layer.weight.shape[1:], dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(x.flatten(1) @ torch.from_numpy(W).T, layer(x).flatten(1))
        assert found[longname].scale == 1


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("model.image_tower.embeddings.patch_embedding", {"text_config": {"model_type": "llama"}}),
        ("model.video_tower.embeddings.patch_embedding", {"text_config": {"model_type": "llama"}}),
        ("vlm.vision_tower.embeddings.patch_embedding", None),
    ],
)
def test_towers_within_a_model_and_for_pictures_or_films(name: str, config: dict[str, Any] | None) -> None:
    vision = {"vision_config": {"model_type": "clip_vision_model", "patch_size": [14, 14]}}
    values = Values(name, {"vlm_config": vision} if config is None else {**config, **vision})
    assert (values.model_type, values("patch_size")) == ("clip_vision_model", 14)
