"""Tables that are looked up, biases and buffers are no matrices, whatever they are called; linear layers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emitted import emitted
from safetensors.torch import save_file
from tiny_modules import model, module, randomise
from torch import nn

from shardesd.matrices import Context, plan
from shardesd.records import Skip, TensorRef

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("transformers")

NO_MATRICES = [
    ("vision_model.positional_embedding_vlm", "position embedding"),
    ("semantic.position_embeds_layer.weight", "position embedding"),
    ("encoder.embeddings.row_embedder.weight", "position embedding"),
    ("vision_model.embeddings.column_embedder.weight", "position embedding"),
    ("encoder.layers.0.self_attn.distance_embedding.weight", "position embedding"),
    ("encoder.wrapped_encoder.embed_positions.pe_k.weight", "position embedding"),
    ("encoder.positional_encoder.position_enc", "position embedding"),
    ("decoder.model.decoder.embed_tokens.3.weight", "embedding"),
    ("model.embed_audio_tokens.embed_audio_tokens.weight", "embedding"),
    ("vocoder.unit_embedding.weight", "embedding"),
    ("roc_bert.embeddings.pronunciation_embed.weight", "embedding"),
    ("tapas.embeddings.token_type_embeddings_1.weight", "embedding"),
    ("query.weight", "embedding"),
    ("multi_modal_projector.query", "embedding"),
    ("image_to_text_projection.latent_query", "embedding"),
    ("transformer_module.queries_embedder.weight", "embedding"),
    ("transformer_module.queries_features.weight", "embedding"),
    ("detr_decoder.query_embed.weight", "embedding"),
    ("label_embeddings_concat", "embedding"),
    ("speech_encoder.encoder.layers.0.self_attn.pos_bias_u", "bias"),
    ("encoder.layers.0.self_attn.bias_v", "bias"),
    ("ibert.encoder.layer.0.attention.self.query.weight_integer", "buffer"),
    ("quantizer.quantizers.0.codebook.embed_avg", "buffer"),
    ("model.layers.0.self_attn.q_proj.norm.scale", "norm"),
    ("model.backbone.position_embedding.row_embeddings.weight", "position embedding"),
    ("model.backbone.position_embedding.column_embeddings.weight", "position embedding"),
    ("encoder.layers.0.attention.rel_attn_embed.weight", "position embedding"),
    ("audio_tower.relative_attention_bias_layer.bias_values.weight", "position embedding"),
    ("_embedding.position_embedding.pos_enc", "position embedding"),
    ("visual_temporal_embed.pos_idx_to_embed", "position embedding"),
    ("layers.2.attn.compressor.ape", "position embedding"),
    ("text_encoder.encoder.attn_layers.0.emb_rel_k", "position embedding"),
    ("transformer.w.weight", "embedding"),
    ("embed_speaker.weight", "embedding"),
    ("fine_acoustics.input_embeds_layers.3.weight", "embedding"),
    ("decoder.input_embeds_layer.weight", "embedding"),
    ("embed_timestep.weight", "embedding"),
    ("model.denoising_class_embed.weight", "embedding"),
    ("model.weight_embedding.weight", "embedding"),
    ("talker.code_predictor.model.codec_embedding.7.weight", "embedding"),
    ("talker.model.codec_embedding.weight", "embedding"),
    ("code2wav.code_embedding.weight", "embedding"),
    ("speaker_id_embedding.weight", "embedding"),
    ("language_id_embedding.weight", "embedding"),
    ("encoder.embed_global.weight", "embedding"),
    ("model.language_model.shared.weight", "embedding"),
    ("led.shared.weight", "embedding"),
    ("ernie.embeddings.task_type_embeddings.weight", "embedding"),
    ("visual_bert.embeddings.visual_token_type_embeddings.weight", "embedding"),
    ("query_768_resolution.weight", "embedding"),
    ("decoder.tgt_embed.weight", "embedding"),
    ("t2u_model.model.decoder.embed_char.weight", "embedding"),
    ("embeddings.xpath_embeddings.xpath_tag_sub_embeddings.12.weight", "embedding"),
    ("char_embeddings.HashBucketCodepointEmbedder_0.weight", "embedding"),
    ("quantizer.quantizers.0.codebook.embed_sum", "embedding"),
    ("quantizer.quantizers.0.codebook.weight", "embedding"),
    ("model.query_feat.weight", "embedding"),
    ("depth_decoder.text_embed_tokens.weight", "embedding"),
    ("prophetnet.decoder.ngram_embeddings.weight", "embedding"),
    ("radio.patch_generator.cls_register_token", "embedding"),
    ("thinker.audio_tower.audio_bos_eos_token.weight", "embedding"),
    ("layers.0.mlp.up_embed.weight", "embedding"),
    ("model.layers.0.attn.q_l2_clip.scale", "elementwise parameter"),
]


@pytest.mark.parametrize(("name", "reason"), NO_MATRICES)
def test_is_no_matrix(name: str, reason: str) -> None:
    stored = TensorRef(name=name, dtype="F32", shape=(64, 32), shard="s", end=64 * 32 * 4)
    (found,) = plan(stored, Context(names=frozenset([name])))
    assert isinstance(found, Skip)
    assert found.reason == reason


@pytest.mark.parametrize(
    "name",
    [
        *("encoder.layer.0.attention.attention.query.weight", "model.layers.0.self_attn.projector.weight"),
        *("encoder.embedder.input_embedding.weight", "encoder.embedder.input_embedding.0.weight"),
        *("input_embedder.rel_pos.embed.weight", "msa_encoder.embed.weight", "masked_embedding.centroids.weight"),
        *("embed_state.weight", "embed_action.weight", "class_embed.2.weight", "model.decoder.class_embed.0.weight"),
        *(
            "decoder.decoder_embed.weight",
            "decoder.decoder_embeddings.weight",
            "embeddings.box_linear_embeddings.weight",
        ),
        *("vision_embed_tokens.weight", "embeddings.xpath_embeddings.xpath_unitseq2_embeddings.weight"),
        *("encoder.layer.0.attention.self.key_global.weight", "encoder.input_linear.weight"),
    ],
)
def test_is_a_matrix(name: str) -> None:
    stored = TensorRef(name=name, dtype="F32", shape=(64, 32), shard="s", end=64 * 32 * 4)
    (found,) = plan(stored, Context(names=frozenset([name])))
    assert not isinstance(found, Skip)


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
PROPHET = {
    **{"vocab_size": 32, "hidden_size": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_buckets": 4},
    **{"num_encoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2},
    **{"num_decoder_layers": 1, "max_position_embeddings": 16},
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "prophetnet": (
        model("ProphetNet", "ProphetNetModel", **PROPHET),
        "decoder.layers.0.self_attn.relative_pos_embeddings",
    ),
    "patchtst": (
        module(
            *("PatchTST", "patchtst.modeling_patchtst", "PatchTSTEmbedding", "encoder.embedder"),
            **{"d_model": 16, "patch_length": 4, "num_input_channels": 2},
        ),
        "encoder.embedder.input_embedding",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_linear_layers_that_are_called_embeddings(name: str, tmp_path: Path) -> None:
    make, path = LAYERS[name]
    built = randomise(make())
    weights = {key: value.clone() for key, value in built.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    built.config.save_pretrained(tmp_path)
    (W,) = emitted(tmp_path)[path].slices
    layer = built.get_submodule(path)
    x = torch.randn(3, W.shape[1], dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(x @ torch.from_numpy(W).T, layer(x))


@pytest.mark.parametrize("path", ["backbone.embed", "acoustic_decoder.embed"])
def test_a_convolution_that_is_called_an_embedding(path: str, tmp_path: Path) -> None:
    """Of WavTokenizer, X-Codec 2 and NeuCodec."""
    built: nn.Module = nn.Conv1d(8, 12, 3, bias=False)
    for word in reversed(path.split(".")):
        built = nn.ModuleDict({word: built})
    weight = built.get_submodule(path).weight
    stored = TensorRef(name=f"{path}.weight", dtype="F32", shape=tuple(weight.shape), shard="s", end=weight.numel() * 4)
    (found,) = plan(stored, Context())
    assert not isinstance(found, Skip)
    assert (found.block_type, found.M, found.N, found.slices) == ("conv", 12, 8, 3)
