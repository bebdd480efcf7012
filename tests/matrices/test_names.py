"""Names of real state dicts → layer index, block type, and whether the tensor is analysed: golden data."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardesd.matrices import (
    BLOCK_TYPES,
    BUILT_IN,
    Context,
    eligible,
    may_be_tied,
    names,
    natural_key,
    parse_name,
    plan,
    tie_order,
)
from shardesd.matrices.eligible import ONE_INPUT
from shardesd.matrices.layouts import Table
from shardesd.options import ScanOptions
from shardesd.records import MatrixRef, Skip, TensorRef

# name, shape, layer_index, block_type, reason ("" where it is analysed)
GOLDEN: dict[str, list[tuple[str, tuple[int, ...], int | None, str, str]]] = {
    "bert": [
        ("bert.embeddings.word_embeddings.weight", (30522, 768), None, "embedding", "embedding"),
        ("bert.embeddings.token_type_embeddings.weight", (2, 768), None, "embedding", "embedding"),
        ("bert.embeddings.position_embeddings.weight", (512, 768), None, "position", "position embedding"),
        ("bert.embeddings.LayerNorm.weight", (768,), None, "norm", "norm"),
        ("bert.encoder.layer.11.attention.self.query.weight", (768, 768), 11, "q_proj", ""),
        ("bert.encoder.layer.11.attention.self.query.bias", (768,), 11, "q_proj", "bias"),
        ("bert.encoder.layer.11.attention.self.key.weight", (768, 768), 11, "k_proj", ""),
        ("bert.encoder.layer.11.attention.self.value.weight", (768, 768), 11, "v_proj", ""),
        ("bert.encoder.layer.11.attention.output.dense.weight", (768, 768), 11, "o_proj", ""),
        ("bert.encoder.layer.11.attention.output.LayerNorm.weight", (768,), 11, "norm", "norm"),
        ("bert.encoder.layer.11.intermediate.dense.weight", (3072, 768), 11, "up_proj", ""),
        ("bert.encoder.layer.11.output.dense.weight", (768, 3072), 11, "down_proj", ""),
        ("bert.pooler.dense.weight", (768, 768), None, "other", ""),
        ("cls.predictions.transform.dense.weight", (768, 768), None, "other", ""),
        ("cls.predictions.decoder.weight", (30522, 768), None, "lm_head", "aspect ratio"),
        ("cls.predictions.bias", (30522,), None, "other", "bias"),
        ("cls.seq_relationship.weight", (2, 768), None, "other", "aspect ratio"),
        ("classifier.weight", (200, 768), None, "other", ""),
    ],
    "qwen, eva, dinov2": [
        ("transformer.h.3.mlp.w1.weight", (5504, 2048), 3, "up_proj", ""),  # w1(x) · silu(w2(x))
        ("transformer.h.3.mlp.w2.weight", (5504, 2048), 3, "gate_proj", ""),
        ("transformer.h.3.mlp.c_proj.weight", (2048, 5504), 3, "down_proj", ""),
        ("visual.blocks.3.mlp.w1.weight", (2730, 1024), 3, "gate_proj", ""),
        ("visual.blocks.3.mlp.w2.weight", (2730, 1024), 3, "up_proj", ""),
        ("visual.blocks.3.mlp.w3.weight", (1024, 2730), 3, "down_proj", ""),
        ("blocks.3.mlp.w3.weight", (1536, 4096), 3, "down_proj", ""),
        ("layers.3.feed_forward.w3.weight", (14336, 4096), 3, "up_proj", ""),
    ],
    "xlm, perceiver, gemma 3n, phi-4 audio, patchtsmixer, diffusers": [
        ("transformer.attentions.3.q_lin.weight", (2048, 2048), 3, "q_proj", ""),
        ("transformer.ffns.3.lin1.weight", (8192, 2048), 3, "up_proj", ""),
        ("encoder.self_attends.3.attention.self.query.weight", (1280, 1280), 3, "q_proj", ""),
        ("conformer.3.attention.attn.q_proj.weight", (1536, 1536), 3, "q_proj", ""),
        ("audio_embed.encoder.encoders.3.self_attn.q_proj.weight", (1024, 1024), 3, "q_proj", ""),
        ("encoder.mlp_mixer_encoder.mixers.3.patch_mixer.mlp.fc1.weight", (8, 4), 3, "up_proj", ""),
        ("mid_block.attentions.0.transformer_blocks.3.attn1.to_q.weight", (640, 640), 3, "q_proj", ""),
    ],
    "roberta, distilbert, electra, deberta, albert, modernbert": [
        ("roberta.encoder.layer.3.output.dense.weight", (768, 3072), 3, "down_proj", ""),
        ("classifier.out_proj.weight", (200, 768), None, "other", ""),
        ("lm_head.dense.weight", (768, 768), None, "other", ""),
        ("lm_head.decoder.weight", (50265, 768), None, "lm_head", "aspect ratio"),
        ("distilbert.transformer.layer.5.attention.q_lin.weight", (768, 768), 5, "q_proj", ""),
        ("distilbert.transformer.layer.5.attention.out_lin.weight", (768, 768), 5, "o_proj", ""),
        ("distilbert.transformer.layer.5.ffn.lin1.weight", (3072, 768), 5, "up_proj", ""),
        ("distilbert.transformer.layer.5.ffn.lin2.weight", (768, 3072), 5, "down_proj", ""),
        ("distilbert.transformer.layer.5.sa_layer_norm.weight", (768,), 5, "norm", "norm"),
        ("vocab_projector.weight", (30522, 768), None, "lm_head", "aspect ratio"),
        ("electra.embeddings_project.weight", (256, 128), None, "other", ""),
        ("generator_lm_head.weight", (30522, 128), None, "lm_head", "aspect ratio"),
        ("deberta.encoder.layer.2.attention.self.query_proj.weight", (768, 768), 2, "q_proj", ""),
        ("deberta.encoder.layer.2.attention.self.in_proj.weight", (2304, 768), 2, "qkv", ""),
        ("deberta.encoder.layer.2.attention.self.q_bias", (768,), 2, "other", "bias"),
        ("deberta.encoder.rel_embeddings.weight", (512, 768), None, "position", "position embedding"),
        ("albert.encoder.embedding_hidden_mapping_in.weight", (768, 128), None, "other", ""),
        ("albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight", (3072, 768), 0, "up_proj", ""),
        ("albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense.weight", (768, 768), 0, "o_proj", ""),
        ("model.layers.4.attn.Wqkv.weight", (2304, 768), 4, "qkv", ""),
        ("model.layers.4.attn.Wo.weight", (768, 768), 4, "o_proj", ""),
        ("model.layers.4.mlp.Wi.weight", (2304, 768), 4, "gate_up", ""),
        ("model.layers.4.mlp.Wo.weight", (768, 1152), 4, "down_proj", ""),
    ],
    "gpt-2, gpt-neox, gpt-j": [
        ("wte.weight", (50257, 768), None, "embedding", "embedding"),
        ("wpe.weight", (1024, 768), None, "position", "position embedding"),
        ("h.5.ln_1.weight", (768,), 5, "norm", "norm"),
        ("h.5.attn.bias", (1, 1, 1024, 1024), 5, "other", "mask"),
        ("h.5.attn.masked_bias", (), 5, "other", "mask"),
        ("h.5.attn.c_attn.bias", (2304,), 5, "qkv", "bias"),
        ("h.5.attn.c_proj.weight", (768, 768), 5, "o_proj", ""),
        ("h.5.mlp.c_fc.weight", (768, 3072), 5, "up_proj", ""),
        ("h.5.mlp.c_proj.weight", (3072, 768), 5, "down_proj", ""),
        ("ln_f.weight", (768,), None, "norm", "norm"),
        ("gpt_neox.embed_in.weight", (50304, 512), None, "embedding", "embedding"),
        ("gpt_neox.layers.2.attention.query_key_value.weight", (1536, 512), 2, "qkv", ""),
        ("gpt_neox.layers.2.attention.dense.weight", (512, 512), 2, "o_proj", ""),
        ("gpt_neox.layers.2.attention.rotary_emb.inv_freq", (8,), 2, "other", "buffer"),
        ("gpt_neox.layers.2.attention.bias", (1, 1, 2048, 2048), 2, "other", "mask"),
        ("gpt_neox.layers.2.mlp.dense_h_to_4h.weight", (2048, 512), 2, "up_proj", ""),
        ("gpt_neox.layers.2.mlp.dense_4h_to_h.weight", (512, 2048), 2, "down_proj", ""),
        ("gpt_neox.final_layer_norm.weight", (512,), None, "norm", "norm"),
        ("embed_out.weight", (50304, 512), None, "lm_head", "aspect ratio"),
        ("transformer.h.27.attn.out_proj.weight", (4096, 4096), 27, "o_proj", ""),
        ("transformer.h.27.mlp.fc_in.weight", (16384, 4096), 27, "up_proj", ""),
        ("transformer.h.27.mlp.fc_out.weight", (4096, 16384), 27, "down_proj", ""),
    ],
    "llama, mistral, qwen, gemma, phi": [
        ("model.embed_tokens.weight", (32000, 4096), None, "embedding", "embedding"),
        ("model.layers.31.self_attn.q_proj.weight", (4096, 4096), 31, "q_proj", ""),
        ("model.layers.31.self_attn.k_proj.weight", (1024, 4096), 31, "k_proj", ""),
        ("model.layers.31.self_attn.v_proj.weight", (1024, 4096), 31, "v_proj", ""),
        ("model.layers.31.self_attn.o_proj.weight", (4096, 4096), 31, "o_proj", ""),
        ("model.layers.31.self_attn.q_norm.weight", (128,), 31, "norm", "norm"),
        ("model.layers.31.self_attn.rotary_emb.inv_freq", (64,), 31, "other", "buffer"),
        ("model.layers.31.mlp.gate_proj.weight", (11008, 4096), 31, "gate_proj", ""),
        ("model.layers.31.mlp.up_proj.weight", (11008, 4096), 31, "up_proj", ""),
        ("model.layers.31.mlp.down_proj.weight", (4096, 11008), 31, "down_proj", ""),
        ("model.layers.31.post_attention_layernorm.weight", (4096,), 31, "norm", "norm"),
        ("model.norm.weight", (4096,), None, "norm", "norm"),
        ("lm_head.weight", (32000, 4096), None, "lm_head", ""),
        ("model.layers.3.self_attn.qkv_proj.weight", (9216, 3072), 3, "qkv", ""),
        ("model.layers.3.mlp.gate_up_proj.weight", (16384, 3072), 3, "gate_up", ""),
        ("model.layers.3.self_attn.dense.weight", (2560, 2560), 3, "o_proj", ""),
        ("tok_embeddings.weight", (32000, 4096), None, "embedding", "embedding"),
        ("layers.7.attention.wq.weight", (4096, 4096), 7, "q_proj", ""),
        ("layers.7.attention.wo.weight", (4096, 4096), 7, "o_proj", ""),
        ("layers.7.feed_forward.w1.weight", (11008, 4096), 7, "gate_proj", ""),
        ("layers.7.feed_forward.w2.weight", (4096, 11008), 7, "down_proj", ""),
        ("layers.7.feed_forward.w3.weight", (11008, 4096), 7, "up_proj", ""),
        ("output.weight", (32000, 4096), None, "lm_head", ""),
    ],
    "t5": [
        ("shared.weight", (32128, 512), None, "embedding", "embedding"),
        ("encoder.embed_tokens.weight", (32128, 512), None, "embedding", "embedding"),
        ("encoder.block.4.layer.0.SelfAttention.q.weight", (512, 512), 4, "q_proj", ""),
        ("encoder.block.4.layer.0.SelfAttention.k.weight", (512, 512), 4, "k_proj", ""),
        ("encoder.block.4.layer.0.SelfAttention.v.weight", (512, 512), 4, "v_proj", ""),
        ("encoder.block.4.layer.0.SelfAttention.o.weight", (512, 512), 4, "o_proj", ""),
        (
            *("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8), 0),
            *("position", "position embedding"),
        ),
        ("decoder.block.10.layer.1.EncDecAttention.o.weight", (512, 512), 10, "o_proj", ""),
        ("decoder.block.0.layer.2.DenseReluDense.wi.weight", (2048, 512), 0, "up_proj", ""),
        ("decoder.block.0.layer.2.DenseReluDense.wi_0.weight", (1024, 512), 0, "gate_proj", ""),
        ("decoder.block.0.layer.2.DenseReluDense.wi_1.weight", (1024, 512), 0, "up_proj", ""),
        ("decoder.block.0.layer.2.DenseReluDense.wo.weight", (512, 1024), 0, "down_proj", ""),
        ("decoder.block.0.layer.2.layer_norm.weight", (512,), 0, "norm", "norm"),
    ],
    "opt, bloom, falcon, mpt": [
        ("model.decoder.embed_positions.weight", (2050, 768), None, "position", "position embedding"),
        ("model.decoder.layers.8.self_attn.out_proj.weight", (768, 768), 8, "o_proj", ""),
        ("model.decoder.layers.8.fc1.weight", (3072, 768), 8, "up_proj", ""),
        ("model.decoder.layers.8.fc2.weight", (768, 3072), 8, "down_proj", ""),
        ("model.decoder.layers.8.self_attn_layer_norm.weight", (768,), 8, "norm", "norm"),
        ("model.decoder.project_in.weight", (1024, 512), None, "other", ""),
        ("word_embeddings.weight", (250880, 1024), None, "embedding", "embedding"),
        ("word_embeddings_layernorm.weight", (1024,), None, "norm", "norm"),
        ("h.3.self_attention.query_key_value.weight", (3072, 1024), 3, "qkv", ""),
        ("h.3.self_attention.dense.weight", (1024, 1024), 3, "o_proj", ""),
        ("transformer.h.3.ln_attn.weight", (4544,), 3, "norm", "norm"),
        ("transformer.blocks.3.attn.Wqkv.weight", (12288, 4096), 3, "qkv", ""),
        ("transformer.blocks.3.ffn.up_proj.weight", (16384, 4096), 3, "up_proj", ""),
    ],
    "vit, clip, siglip, dinov2, swin, timm": [
        ("vit.embeddings.cls_token", (1, 1, 768), None, "embedding", "embedding"),
        ("vit.embeddings.position_embeddings", (1, 197, 768), None, "position", "position embedding"),
        ("vit.embeddings.patch_embeddings.projection.weight", (768, 3, 16, 16), None, "conv", ""),
        ("vit.encoder.layer.3.attention.attention.query.weight", (768, 768), 3, "q_proj", ""),
        ("vit.encoder.layer.3.attention.output.dense.weight", (768, 768), 3, "o_proj", ""),
        ("vit.encoder.layer.3.layernorm_before.weight", (768,), 3, "norm", "norm"),
        ("text_model.embeddings.token_embedding.weight", (49408, 512), None, "embedding", "embedding"),
        ("text_model.embeddings.position_embedding.weight", (77, 512), None, "position", "position embedding"),
        ("text_model.embeddings.position_ids", (1, 77), None, "other", "buffer"),
        ("text_model.encoder.layers.6.self_attn.q_proj.weight", (512, 512), 6, "q_proj", ""),
        ("text_projection.weight", (512, 512), None, "other", ""),
        ("text_projection", (512, 512), None, "other", ""),
        ("visual.proj", (768, 512), None, "other", ""),
        ("visual.transformer.resblocks.2.attn.in_proj_weight", (2304, 768), 2, "qkv", ""),
        ("visual.transformer.resblocks.2.attn.in_proj_bias", (2304,), 2, "other", "bias"),
        ("vision_model.embeddings.class_embedding", (768,), None, "embedding", "embedding"),
        ("vision_model.embeddings.patch_embedding.weight", (768, 3, 32, 32), None, "conv", ""),
        ("vision_model.pre_layrnorm.weight", (768,), None, "norm", "norm"),
        ("logit_scale", (), None, "other", "elementwise parameter"),
        ("vision_model.head.probe", (1, 1, 768), None, "embedding", "embedding"),
        ("embeddings.patch_embedding.weight", (768, 588), None, "other", ""),  # SigLIP 2: linear
        ("encoder.layer.0.layer_scale1.lambda1", (384,), 0, "other", "elementwise parameter"),
        ("layers.2.blocks.5.attn.relative_position_bias_table", (169, 12), 2, "position", "position embedding"),
        ("encoder.layers.2.blocks.5.attention.self.relative_position_index", (49, 49), 2, "other", "buffer"),
        ("encoder.layers.2.downsample.reduction.weight", (768, 1536), 2, "other", ""),
        ("patch_embed.proj.weight", (192, 3, 16, 16), None, "conv", ""),
        ("pos_embed", (1, 197, 192), None, "position", "position embedding"),
        ("blocks.2.attn.qkv.weight", (576, 192), 2, "qkv", ""),
        ("blocks.2.attn.proj.weight", (192, 192), 2, "o_proj", ""),
        ("blocks.2.mlp.fc1.weight", (768, 192), 2, "up_proj", ""),
        ("blocks.2.norm1.weight", (192,), 2, "norm", "norm"),
        ("head.weight", (1000, 192), None, "other", ""),
    ],
    "whisper, wav2vec2": [
        ("model.encoder.conv1.weight", (384, 80, 3), None, "conv", ""),
        ("model.encoder.layers.3.self_attn.out_proj.weight", (384, 384), 3, "o_proj", ""),
        ("model.decoder.layers.0.encoder_attn.k_proj.weight", (384, 384), 0, "k_proj", ""),
        ("model.decoder.layers.0.encoder_attn_layer_norm.weight", (384,), 0, "norm", "norm"),
        ("proj_out.weight", (51865, 384), None, "lm_head", "aspect ratio"),
        ("feature_extractor.conv_layers.0.conv.weight", (512, 1, 10), 0, "conv", ONE_INPUT),
        ("feature_extractor.conv_layers.1.conv.weight", (512, 512, 3), 1, "conv", ""),
        ("encoder.pos_conv_embed.conv.weight_v", (768, 48, 128), None, "conv", "parametrised weight"),
        (
            *("encoder.pos_conv_embed.conv.parametrizations.weight.original1", (768, 48, 128), None),
            *("conv", "parametrised weight"),
        ),
        ("encoder.layers.0.feed_forward.intermediate_dense.weight", (3072, 768), 0, "up_proj", ""),
    ],
    "resnet, convnext, torchvision": [
        ("resnet.embedder.embedder.convolution.weight", (64, 3, 7, 7), None, "conv", ""),
        ("resnet.embedder.embedder.normalization.weight", (64,), None, "norm", "norm"),
        ("resnet.embedder.embedder.normalization.num_batches_tracked", (), None, "other", "buffer"),
        ("resnet.encoder.stages.2.layers.1.layer.0.convolution.weight", (256, 1024, 1, 1), 2, "conv", ""),
        ("resnet.encoder.stages.2.layers.0.shortcut.convolution.weight", (1024, 512, 1, 1), 2, "conv", ""),
        ("classifier.1.weight", (1000, 2048), None, "other", ""),
        ("convnext.embeddings.patch_embeddings.weight", (96, 3, 4, 4), None, "conv", ""),
        ("convnext.encoder.stages.1.layers.2.dwconv.weight", (192, 1, 7, 7), 1, "conv", ONE_INPUT),
        ("convnext.encoder.stages.1.layers.2.pwconv1.weight", (768, 192), 1, "up_proj", ""),
        ("convnext.encoder.stages.1.layers.2.pwconv2.weight", (192, 768), 1, "down_proj", ""),
        ("convnext.encoder.stages.1.layers.2.layer_scale_parameter", (192,), 1, "other", "elementwise parameter"),
        ("features.1.0.layer_scale", (96, 1, 1), 1, "other", "elementwise parameter"),
        ("conv1.weight", (64, 3, 7, 7), None, "conv", ""),
        ("bn1.weight", (64,), None, "norm", "norm"),
        ("bn1.running_mean", (64,), None, "other", "buffer"),
        ("layer2.1.conv1.weight", (128, 512, 1, 1), 2, "conv", ""),
        ("layer2.0.downsample.0.weight", (512, 256, 1, 1), 2, "conv", ""),
        ("layer2.0.downsample.1.weight", (512,), 2, "other", "vector"),
        ("fc.weight", (1000, 2048), None, "other", ""),
        ("features.denseblock3.denselayer2.conv1.weight", (128, 288, 1, 1), 3, "conv", ""),
        ("features.28.weight", (512, 512, 3, 3), 28, "conv", ""),
    ],
    "mixture of experts": [
        ("model.layers.9.block_sparse_moe.gate.weight", (8, 4096), 9, "router", "aspect ratio"),
        ("model.layers.9.block_sparse_moe.experts.7.w1.weight", (14336, 4096), 9, "expert", ""),
        ("model.layers.9.mlp.gate.weight", (256, 1024), 9, "router", ""),
        ("model.layers.9.mlp.gate.e_score_correction_bias", (256,), 9, "other", "bias"),
        ("model.layers.9.mlp.experts.63.gate_proj.weight", (1408, 2048), 9, "expert", ""),
        ("model.layers.9.mlp.shared_experts.down_proj.weight", (2048, 2816), 9, "expert", ""),
        ("model.layers.9.mlp.shared_expert_gate.weight", (1, 2048), 9, "router", "one row or column"),
        ("model.layers.9.mlp.router.weight", (32, 2880), 9, "router", "aspect ratio"),
        ("model.layers.9.mlp.experts.gate_up_proj_bias", (32, 5760), 9, "expert", "bias"),
        ("model.layers.9.self_attn.kv_a_proj_with_mqa.weight", (576, 2048), 9, "kv", ""),
        ("model.layers.9.self_attn.kv_a_layernorm.weight", (512,), 9, "norm", "norm"),
        ("model.layers.9.self_attn.q_b_proj.weight", (3072, 1536), 9, "q_proj", ""),
        ("model.layers.9.self_attn.q_proj.weight_scale_inv", (16, 16), 9, "q_proj", "quantisation parameter"),
        ("encoder.block.1.layer.1.mlp.experts.expert_3.wi.weight", (2048, 768), 1, "expert", ""),
        ("encoder.block.1.layer.1.mlp.router.classifier.weight", (8, 768), 1, "router", "aspect ratio"),
    ],
    "mamba, rwkv": [
        ("backbone.embeddings.weight", (50280, 768), None, "embedding", "embedding"),
        ("backbone.layers.1.mixer.A_log", (1536, 16), 1, "other", "elementwise parameter"),
        ("backbone.layers.1.mixer.D", (1536,), 1, "other", "elementwise parameter"),
        ("backbone.layers.1.mixer.conv1d.weight", (1536, 1, 4), 1, "conv", ONE_INPUT),
        ("backbone.layers.1.mixer.in_proj.weight", (3072, 768), 1, "other", ""),
        ("backbone.layers.1.mixer.out_proj.weight", (768, 1536), 1, "other", ""),
        ("backbone.norm_f.weight", (768,), None, "norm", "norm"),
        ("rwkv.blocks.1.attention.key.weight", (768, 768), 1, "k_proj", ""),
        ("rwkv.blocks.1.feed_forward.key.weight", (3072, 768), 1, "up_proj", ""),
        ("rwkv.blocks.1.feed_forward.value.weight", (768, 3072), 1, "down_proj", ""),
        ("rwkv.blocks.1.attention.time_decay", (768,), 1, "other", "elementwise parameter"),
    ],
    "anybody's": [
        ("0.weight", (64, 32), None, "other", ""),
        ("weight", (64, 32), None, "other", ""),
        ("W", (64, 32), None, "other", ""),
        ("fc1.weight", (64, 32), None, "up_proj", ""),
        ("myfc1.weight", (64, 32), None, "other", ""),
        ("embedder.proj.weight", (64, 32), None, "other", ""),
        ("shared_embedding_projection.weight", (64, 32), None, "other", ""),
        ("pattern.proj.weight", (64, 32), None, "other", ""),
        ("2.weight", (16, 8, 5), None, "conv", ""),
        ("mystery", (16, 8, 5), None, "other", "unknown layout"),
        ("mystery.weight", (16, 64, 64), None, "other", "unknown layout"),
        ("w", (4,), None, "other", "vector"),
        ("step", (), None, "other", "scalar"),
        ("w", (0, 4), None, "other", "empty"),
        ("layer2.blocks.1.fc.weight", (64, 32), 2, "other", ""),
        ("blocks.1.layer2.fc.weight", (64, 32), 1, "other", ""),
        ("layers.99999999999999999999.weight", (64, 32), None, "other", ""),
    ],
}
CASES = [(family, *case) for family, cases in GOLDEN.items() for case in cases]


@pytest.mark.parametrize(("family", "name", "shape", "layer_index", "block_type", "reason"), CASES)
def test_golden(
    family: str, name: str, shape: tuple[int, ...], layer_index: int | None, block_type: str, reason: str
) -> None:
    unsplit = Context(options=ScanOptions(split="off"))
    (item,) = plan(TensorRef(name=name, dtype="F32", shape=shape, shard="s"), unsplit)
    assert (item.layer_index, item.block_type) == (layer_index, block_type)
    assert item.longname == name.removesuffix(".weight")
    if reason:
        assert isinstance(item, Skip)
        assert (item.reason, item.status) == (reason, "skipped")
    else:
        assert isinstance(item, MatrixRef)
        assert shape[:2] == (item.M, item.N)


def test_a_name_alone_tells_what_golden_names_tell() -> None:
    for _, name, shape, layer_index, block_type, _ in CASES:
        parsed = parse_name(name)
        assert parsed.layer_index == layer_index, name
        if len(shape) < 3 and block_type != "other":
            assert parsed.block_type == block_type, name


def test_natural_key_orders_numbers_by_value() -> None:
    ordered = [
        *(
            "0.weight",
            "2.weight",
            "10.weight",
            "h.1.attn",
            "h.1.mlp",
            "h.2.attn",
            "h.10.attn",
            "h.100000000000000000000",
        ),
        *("layer1.0.a", "layer1.10.a", "layer2.0.a", "model-00002-of-00010", "model-00010-of-00010"),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=natural_key) == ordered


@given(st.text("ab.0123456789²٣", max_size=12), st.text("ab.0123456789²٣", max_size=12))
def test_natural_key_is_a_total_order(a: str, b: str) -> None:
    assert (natural_key(a) == natural_key(b)) == (a == b)
    assert (natural_key(a) < natural_key(b)) != (natural_key(b) <= natural_key(a))


@given(st.text(max_size=60))
def test_any_name_can_be_parsed(name: str) -> None:
    parsed = parse_name(name)
    assert parsed.block_type in BLOCK_TYPES
    assert parsed.longname == name.removesuffix(".weight")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["attn", "a_", "layer", "norm_", "experts.", "0.", "weight_", ".h.1"])
def test_a_hostile_name_costs_no_time(piece: str) -> None:
    name = piece * 100_000
    parse_name(name)
    natural_key(name)
    assert plan(TensorRef(name=name, dtype="F32", shape=(8, 8), shard="s"), Context())


def test_only_embeddings_and_heads_may_be_tied() -> None:
    tied = [
        *("wte.weight", "lm_head.weight", "shared.weight", "decoder.embed_tokens.weight", "embed_out.weight"),
        *("cls.predictions.decoder.weight", "lm_head.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ]
    untied = [
        *(
            "h.1.attn.c_proj.weight",
            "wpe.weight",
            "lm_head.dense.weight",
            "cls.predictions.decoder.bias",
            "lm_head.bias",
        ),
        *("model.layers.3.mlp.up_proj.weight", "vision_model.embeddings.patch_embedding.weight", "pooler.dense.weight"),
    ]
    assert [name for name in tied + untied if may_be_tied(name)] == tied


def test_the_original_of_tied_tensors_is_the_outermost_embedding() -> None:
    names = [
        *("lm_head.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "shared.weight"),
        "cls.predictions.decoder.weight",
    ]
    assert sorted(names, key=tie_order) == [
        *("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight"),
        "cls.predictions.decoder.weight",
    ]


@given(st.sampled_from(sorted({name for rows in GOLDEN.values() for name, *_ in rows})), st.integers(0, 10**9))
def test_no_rule_asks_which_layer_it_is(name: str, number: int) -> None:
    """Names are looked up with their numbers left out: as the rules say of the whole name."""
    renumbered = re.sub(r"(?<=\.)[0-9]+(?=\.)", str(number), name)
    stem = names._PARAMETER.sub("", renumbered.removesuffix(".weight"))
    expected = next((part for part, rule in names._ROLES if rule.search(stem)), "other")
    assert names.role(renumbered.removesuffix(".weight")) == expected
    reason = next((reason for reason, rule in eligible._BY_NAME if rule.search(renumbered)), "")
    assert eligible._reason_of(names.unnumbered(renumbered)) == reason
    for model_type in ("llama", "gpt_oss", "dbrx", "mixtral", "qwen3_next", "chatglm", "phi3"):
        asked = Table(BUILT_IN.rows).named(renumbered, model_type)
        assert BUILT_IN.named(renumbered, model_type) == asked


def test_diffusers_have_no_vocabulary() -> None:
    stored = TensorRef(name="proj_out.weight", dtype="F32", shape=(64, 96), shard="s", end=64 * 96 * 4)
    for config, expected in (
        ({"_class_name": "FluxTransformer2DModel"}, "other"),
        ({"model_type": "whisper"}, "lm_head"),
    ):
        (found,) = plan(stored, Context(config=config))
        assert found.block_type == expected
