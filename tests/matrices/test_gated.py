"""Gated linear units that a convolution or a linear layer feeds: both halves, proved on the models' own forward passes.

The model runs on random numbers. Of each layer whose output reaches a gate, what went in is put through the matrices
that a scan emits, and the gated product must be what the model's own gate gave. No rule of how tensors are cut is
repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emitted import Emitted, emitted
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from tiny_modules import inside, model, module, of, randomise, save
from torch import nn

import shardesd
from shardesd.errors import OptionError

pytestmark = pytest.mark.filterwarnings("ignore")
transformers = pytest.importorskip("transformers")

H = 16
CONFORMER = {
    **{"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32},
    **{"conv_depthwise_kernel_size": 3, "add_adapter": True, "num_adapter_layers": 2, "output_hidden_size": H},
}
SOUND = {
    **{"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
SEAMLESS = {
    **{"hidden_size": H, "speech_encoder_layers": 1, "speech_encoder_attention_heads": 2, "num_adapter_layers": 1},
    **{"speech_encoder_intermediate_size": 24, "conv_depthwise_kernel_size": 3, "feature_projection_input_dim": 8},
    **{"adaptor_kernel_size": 4, "adaptor_stride": 2},
}


@dataclass
class Gated:
    layer: nn.Module
    given: torch.Tensor
    product: torch.Tensor
    gate: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid


def by_glu(model: nn.Module, run: Callable[[], object]) -> dict[str, Gated]:
    """Layer → what went in, and what torch's own gated linear unit made of what came out."""
    given: dict[int, tuple[str, nn.Module, torch.Tensor]] = {}
    found: dict[str, Gated] = {}
    keep: list[torch.Tensor] = []
    own = nn.functional.glu

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            keep.append(out)  # or another tensor could come to lie where this one lay
            given[out.data_ptr()] = name, module, args[0]

        return hook

    def glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        out = own(x, dim)
        name, layer, before = given[x.data_ptr()]
        found[name] = Gated(layer, before, out if dim == 1 or not isinstance(layer, nn.Conv1d) else out.mT)
        return out

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d)
    ]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "glu", glu)
        run()
    for hook in hooks:
        hook.remove()
    return found


def product_of(gated: Gated, up: Emitted, gate: Emitted) -> torch.Tensor:
    def through(half: Emitted) -> torch.Tensor:
        weight = torch.from_numpy(np.stack(half.slices, axis=-1))
        if isinstance(gated.layer, nn.Linear):
            return gated.given @ weight[..., 0].T
        layer = gated.layer
        return nn.functional.conv1d(gated.given, weight, None, layer.stride, layer.padding, layer.dilation)

    return through(up) * gated.gate(through(gate))


def sound(model: nn.Module) -> object:
    return model(torch.randn(2, 400, dtype=torch.float64))


def features(width: int) -> Callable[[nn.Module], object]:
    return lambda model: model(torch.randn(2, 24, width, dtype=torch.float64))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], int]] = {
    "wav2vec2-conformer": (
        model("Wav2Vec2Conformer", "Wav2Vec2ConformerModel", **CONFORMER, **SOUND),
        sound,
        3,
    ),
    "wav2vec2": (model("Wav2Vec2", "Wav2Vec2Model", **CONFORMER, **SOUND), sound, 2),
    "wavlm": (model("WavLM", "WavLMModel", **CONFORMER, **SOUND), sound, 2),
    "wav2vec2-bert": (
        model("Wav2Vec2Bert", "Wav2Vec2BertModel", **CONFORMER, feature_projection_input_dim=8),
        features(8),
        5,
    ),
    "seamless": (
        module(
            "SeamlessM4T",
            "seamless_m4t.modeling_seamless_m4t",
            "SeamlessM4TSpeechEncoder",
            "speech_encoder",
            **SEAMLESS,
        ),
        inside(24, 8),
        3,
    ),
    "parakeet": (
        module(
            "ParakeetEncoder",
            "parakeet.modeling_parakeet",
            "ParakeetEncoderConvolutionModule",
            "encoder.layers.0.conv",
            hidden_size=H,
            conv_kernel_size=3,
        ),
        inside(9, H),
        1,
    ),
    "granite_speech": (
        module(
            "GraniteSpeechEncoder",
            "granite_speech.modeling_granite_speech",
            "GraniteSpeechConformerConvModule",
            "encoder.layers.0.conv",
            hidden_dim=H,
            conv_expansion_factor=2,
            conv_kernel_size=3,
        ),
        inside(9, H),
        1,
    ),
    "speech_to_text": (
        module(
            "Speech2Text",
            "speech_to_text.modeling_speech_to_text",
            "Conv1dSubsampler",
            "model.encoder.conv",
            d_model=H,
            conv_channels=24,
            input_feat_per_channel=8,
        ),
        inside(24, 8),
        2,
    ),
    "gemma3n": (
        module(
            "Gemma3nAudio",
            "gemma3n.modeling_gemma3n",
            "Gemma3nAudioConformerLightConv1d",
            "model.audio_tower.conformer.0.lconv1d",
            hidden_size=H,
            conf_conv_kernel_size=3,
        ),
        inside(9, H),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_both_halves_of_a_gated_layer(name: str, tmp_path: Path) -> None:
    make, run, count = CASES[name]
    built = randomise(make())
    save(built, tmp_path)
    halves = emitted(tmp_path)
    found = by_glu(built, lambda: run(built))
    assert len(found) == count
    for longname, gated in found.items():
        up, gate = halves[f"{longname}_up"], halves[f"{longname}_gate"]
        assert longname not in halves
        types = ("conv", "conv") if isinstance(gated.layer, nn.Conv1d) else ("up_proj", "gate_proj")
        assert (up.block_type, gate.block_type) == types
        torch.testing.assert_close(product_of(gated, up, gate), gated.product, rtol=1e-6, atol=1e-9)


VISION = {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": H}, "downsample_factor": 2}
GATING = {"hidden_size": H, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
PROJECTED: dict[str, tuple[Callable[[], nn.Module], str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cohere2_vision": (
        module(
            "Cohere2Vision",
            "cohere2_vision.modeling_cohere2_vision",
            "Cohere2VisionMultiModalProjector",
            "model.multi_modal_projector",
            **VISION,
            alignment_intermediate_size=40,
        ),
        *("linear_1", "linear_2", nn.functional.silu),
    ),
    "aya_vision": (
        module(
            "AyaVision",
            "aya_vision.modeling_aya_vision",
            "AyaVisionMultiModalProjector",
            "model.multi_modal_projector",
            **VISION,
        ),
        *("linear_1", "linear_2", nn.functional.silu),
    ),
    "clvp": (
        module(
            "ClvpEncoder",
            "clvp.modeling_clvp",
            "ClvpEncoderMLP",
            "text_encoder_model.layers.0.mlp",
            hidden_size=H,
            intermediate_size=24,
            hidden_act="gelu",
        ),
        *("fc1.proj", "fc2", nn.functional.gelu),
    ),
    **{
        name: (
            module(config, f"{name}.modeling_{name}", f"{config}GatingMLP", f"{path}.layers.0.mlp", **GATING),
            *("fc1", "fc2", nn.functional.silu),
        )
        for name, config, path in (
            ("moshi", "Moshi", "decoder.model"),
            ("kyutai_speech_to_text", "KyutaiSpeechToText", "model"),
        )
    },
}


@pytest.mark.parametrize("name", PROJECTED)
def test_both_halves_of_a_projector(name: str, tmp_path: Path) -> None:
    """What its second layer is given: half of what the first one gives, times the other half's activation."""
    make, first, second, act = PROJECTED[name]
    built = randomise(make())
    save(built, tmp_path)
    halves = emitted(tmp_path)
    layer, down = (built.get_submodule(f"{built.prefix}.{word}") for word in (first, second))
    seen: dict[str, torch.Tensor] = {}
    layer.register_forward_pre_hook(lambda module, args: seen.update(given=args[0]))
    down.register_forward_pre_hook(lambda module, args: seen.update(product=args[0]))
    with torch.no_grad():
        inside(16, H)(built)
        up, gate = (halves[f"{built.prefix}.{first}_{word}"] for word in ("up", "gate"))
        torch.testing.assert_close(product_of(Gated(layer, seen["given"], down, act), up, gate), seen["product"])


SEVERAL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], str, tuple[str, ...]]] = {
    "focalnet": (
        module(
            *("FocalNet", "focalnet.modeling_focalnet", "FocalNetModulation", "stages.0.layers.0.modulation", 0, H),
            focal_levels=[2],
            focal_windows=[3],
        ),
        *(inside(5, 5, H), "projection_in", ("q", "ctx", "gates")),
    ),
    "wavtokenizer": (
        module(
            *("WavTokenizer", "wavtokenizer.modeling_wavtokenizer", "WavTokenizerISTFTHead", "head"),
            decoder_hidden_size=2 * H,
        ),
        *(inside(9, 2 * H), "linear", ("magnitude", "phase")),
    ),
    "xcodec2": (
        module(
            *("Xcodec2", "xcodec2.modeling_xcodec2", "Xcodec2ISTFTHead", "acoustic_decoder.head"),
            hidden_size=H,
        ),
        *(inside(9, H), "linear", ("magnitude", "phase")),
    ),
    "vits": (
        module(
            *("Vits", "vits.modeling_vits", "VitsTextEncoder", "text_encoder"),
            hidden_size=H,
            num_hidden_layers=1,
            ffn_dim=24,
            flow_size=12,
        ),
        lambda model: model.get_submodule("text_encoder")(
            input_ids=torch.ones(2, 9, dtype=torch.long), padding_mask=torch.ones(2, 9, 1, dtype=torch.float64)
        ),
        *("project", ("mean", "log_variance")),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_outputs_that_mean_several_things(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model's own split of a layer's output gives is what the layer's parts give."""
    make, run, layer, words = SEVERAL[name]
    built = randomise(make())
    save(built, tmp_path)
    split: list[tuple[torch.Tensor, ...]] = []

    def noted(own: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def call(*args: Any, **more: Any) -> tuple[torch.Tensor, ...]:
            split.append(own(*args, **more))
            return split[-1]

        return call

    given: list[torch.Tensor] = []
    path = f"{built.prefix}.{layer}"
    built.get_submodule(path).register_forward_pre_hook(lambda module, args: given.append(args[0]))
    monkeypatch.setattr(torch, "split", noted(torch.split))
    monkeypatch.setattr(torch.Tensor, "chunk", noted(torch.Tensor.chunk))
    with torch.no_grad():
        run(built)
    found = emitted(tmp_path)
    last = next(one for one in reversed(split) if len(one) == len(words))
    for word, expected in zip(words, last, strict=True):
        (W,) = found[f"{path}_{word}"].slices
        x = given[0].mT if isinstance(built.get_submodule(path), nn.Conv1d) else given[0]
        own = x @ torch.from_numpy(W).T
        torch.testing.assert_close(own if own.shape == expected.shape else own.movedim(-1, 1), expected)


def test_gates_that_are_called_otherwise_on_disk(tmp_path: Path) -> None:
    """DINOv2's two layers are saved as one."""
    config = of("Dinov2", hidden_size=H, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    config.use_swiglu_ffn = True
    built = randomise(transformers.Dinov2Model(config))
    built.save_pretrained(tmp_path)
    found = emitted(tmp_path)
    path = "encoder.layer.0.mlp"
    mlp = built.get_submodule(path)
    names = [name for name in found if name.startswith(path) and "gate" in name]
    assert names, sorted(found)
    x = torch.randn(5, H, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    (down,) = (layer for name, layer in mlp.named_children() if name in ("down_proj", "weights_out"))
    down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        mlp(x)
    (gate_name,) = names
    up, gate = (found[name].slices[0] for name in (gate_name.replace("gate", "up"), gate_name))
    expected = nn.functional.silu(x @ torch.from_numpy(gate).T) * (x @ torch.from_numpy(up).T)
    torch.testing.assert_close(expected, seen[0])


@pytest.mark.parametrize("name", ["wav2vec2-conformer", "wav2vec2", "wavlm"])
def test_the_first_convolution_of_sound_is_one_matrix(name: str, tmp_path: Path) -> None:
    """It takes windows of one channel: the model multiplies each by all of the kernel."""
    built = randomise(CASES[name][0]())
    save(built, tmp_path)
    longname = "feature_extractor.conv_layers.0.conv"
    found = emitted(tmp_path)[longname]
    with torch.no_grad():
        windows = torch.eye(10, dtype=torch.float64)
        expected = built.get_submodule(longname)(windows[:, None])[..., 0].T
    (only,) = found.slices
    np.testing.assert_allclose(only, expected, atol=1e-12)
    assert found.scale == 1


def test_spectra_of_the_halves(tmp_path: Path) -> None:
    """All kernel positions of a half make one ESD, as those of a whole kernel do."""
    built = randomise(CASES["wav2vec2-conformer"][0]())
    save(built, tmp_path)
    halves = emitted(tmp_path)
    result = shardesd.scan(tmp_path, max_aspect=0)
    assert sorted(result.spectra) == sorted(halves)
    for longname, eigs in result.spectra.items():
        one = halves[longname]
        svd = [np.linalg.svd(matrix, compute_uv=False) ** 2 * one.scale for matrix in one.slices]
        np.testing.assert_allclose(eigs, np.sort(np.concatenate(svd)), rtol=1e-8, atol=1e-12)
    whole = shardesd.scan(tmp_path, max_aspect=0, split="off").layers["longname"].to_list()
    assert "encoder.layers.0.conv_module.pointwise_conv1" in whole


def test_a_backbone_is_cut_as_by_itself(tmp_path: Path) -> None:
    """Its config lies within that of the model around it."""
    inner = of("Dinov2", hidden_size=H, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    inner.use_swiglu_ffn, inner.out_features = True, ["stage1"]
    outer = of("DepthAnything", backbone_config=inner, neck_hidden_sizes=[8], reassemble_factors=[1])
    built = randomise(transformers.Dinov2Model(inner))
    built.save_pretrained(tmp_path)
    alone = emitted(tmp_path)
    weights = {f"backbone.{name}": value for name, value in load_numpy(tmp_path / "model.safetensors").items()}
    save_numpy(weights, tmp_path / "model.safetensors")
    outer.save_pretrained(tmp_path)
    inside = emitted(tmp_path)
    assert sorted(inside) == sorted(f"backbone.{name}" for name in alone)
    assert any(name.endswith("_gate") for name in inside) or "encoder.layer.0.mlp.gate_proj" in alone
    for name, one in alone.items():
        assert len(one.slices) == len(inside[f"backbone.{name}"].slices)
        assert np.array_equal(one.slices[0], inside[f"backbone.{name}"].slices[0])


def test_globs_see_the_halves(tmp_path: Path) -> None:
    save(randomise(CASES["wav2vec2-conformer"][0]()), tmp_path)
    everything = emitted(tmp_path)
    path = "encoder.layers.0.conv_module.pointwise_conv1"
    convs = {name for name, one in everything.items() if name.endswith("_gate") and one.block_type == "conv"}
    assert len(convs) == 3
    assert set(emitted(tmp_path, include=("*_gate",))) == convs
    assert set(emitted(tmp_path, include=(f"{path}_gate",))) == {f"{path}_gate"}
    assert not emitted(tmp_path, include=(path,))
    assert set(emitted(tmp_path, exclude=("*_gate",))) == set(everything) - convs


def test_a_users_row_for_a_convolution(tmp_path: Path) -> None:
    W = np.random.default_rng(0).standard_normal((16, 8, 3))
    save_numpy({"layers.0.c.weight": W, "layers.0.w.weight": W[..., 0].copy()}, tmp_path / "model.safetensors")
    layouts = tmp_path / "own.toml"
    row = 'names="c|w"\nconv=true\ngroups="2"\nparts=["a: 3", "b"]'
    layouts.write_text(f"[[layout]]\n{row}\n")
    found = shardesd.scan(tmp_path, layout=str(layouts))
    assert sorted(found.spectra) == ["layers.0.c_a", "layers.0.c_b", "layers.0.w"]
    grouped = W.reshape(2, 8, 8, 3)
    for part, rows in (("a", slice(0, 3)), ("b", slice(3, 8))):
        kernel = grouped[:, rows].reshape(-1, 8, 3)
        svd = [np.linalg.svd(kernel[..., k], compute_uv=False) ** 2 * 0.5 for k in range(3)]
        np.testing.assert_allclose(found.spectra[f"layers.0.c_{part}"], np.sort(np.concatenate(svd)), rtol=1e-9)
    for more in ('experts="2"', "flatten=true"):
        layouts.write_text(f"[[layout]]\n{row}\n{more}\n")
        with pytest.raises(OptionError, match="conv goes with neither"):
            shardesd.scan(tmp_path, layout=str(layouts))
