"""Models that share a layout, by ``model_type`` (globs)."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MLA = words(
    "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 kimi_k2 kimi_linear glm4_moe_lite longcat_flash minicpm3"
    " mistral4 mistral_large4* axk* youtu glm_moe_dsa glm5_next* bailing_hybrid dots3_note* hy_v4*"
)
"""Multi-head latent attention."""
GATED_Q = words("qwen3_next qwen3_5* qwen4_exp*")
"""Each head's query and output gate lie side by side in q_proj."""
QWEN_LIKE_VISION = words("qwen2_vl* qwen2_5_vl* qwen3_vl* qwen3_omni* qwen3_5* qwen4_exp* glm4v*")
VISION_THIRDS = QWEN_LIKE_VISION + words(
    "glm_ocr* glm_image* glm5_next* ernie4_5_vl* dots3_note* cohere_compass* blip* instructblip* sam sam2* sam_*"
    " seggpt slanext* got_ocr2* deepseek_ocr2* vitdet timesformer mgp-str hiera florence2* florence_* intern_vit_6b"
    " pp_formulanet* pp_ocrv5* pp_ocrv6* unlimited_ocr*"
)
STACKED_GATE_UP = words(
    "mixtral qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe* qwen3_omni_moe* qwen3_5_moe* qwen4_exp* deepseek_v*"
    " deepseek_ocr2* glm* ernie4_5* olmoe flex_olmo phimoe jamba minimax* dots* afmoe axk* bailing_hybrid beam"
    " cohere2_moe diffusion_gemma* exaone_moe flint gemma4* granitemoe* hy_v* hunyuan_v1_moe inkling* kimi_* kolibri1"
    " laguna lara_mini lfm2_moe longcat_flash mellum mimo_v2_flash mistral4 mistral_large4* muse_spark* solar_open"
    " step3p7* unlimited_ocr* zaya"
)
"""experts.gate_up_proj of (E, 2I, H): gate, then up."""
PATCHED = QWEN_LIKE_VISION + words(
    "vit vit_mae vit_msn vivit videomae deit beit data2vec-vision dinov2* dinov3_vit ijepa eomt dpt yolos vilt vitdet"
    " clip* siglip siglip_* chinese_clip* clipseg* owlvit* owlv2* xclip* metaclip_2* altclip* blip* instructblip* git*"
    " idefics* flava* groupvit* layoutlmv3 swin swinv2 swin2sr donut-swin sam sam_* seggpt mgp-str timesformer pixtral"
    " internvl* intern_vit_6b convnext convnextv2 aimv2* bridgetower* cohere_compass* eomt_dinov3 exaone4_5* focalnet"
    " glm5_next* glm_image* glm_ocr* got_ocr2* granite_docling* hunyuan_vl* hy_v4_vl* janus* kimi_k25* kosmos_2_vision*"
    " lw_detr_vit maskformer-swin minicpm_ocr* minicpmv4_* minimax_m3_vl* mlcd* ovis2* paddleocr_vl* phi4_multimodal*"
    " pixio pp_chart2table* qianfan_ocr* qwen2_5_omni* rf_detr* sam3* sapiens2 slanext* smolvlm* step3p5* step3p7*"
    " tipsv2* udop video_llama_3* videomt vjepa2"
)
"""Models that cut an image into patches which don't overlap: the kernel steps by its own size."""


GLU_CONV = words("wav2vec2* data2vec-audio hubert wavlm seamless_m4t* parakeet* nemotron_asr* lasr* fastspeech2*")
"""A gated linear unit follows some of their convolutions: the first half of the channels, times σ of the second."""
SOUND = words("wav2vec2* hubert wavlm unispeech* data2vec-audio sew* speecht5*")
"""Models whose first convolution takes windows of the sound itself."""
TIMM_SWIGLU = words(
    "vit_giant_patch14_dinov2 vit_giant_patch14_reg4_dinov2 vit_giant_patch14_reg1_tipsv2 eva02_tiny_patch14_224"
    " eva02_small_patch14_224 eva02_tiny_patch14_336 eva02_small_patch14_336 deepseek_vit_412m deepseek_vit_412m_align"
    " deepseek_vit_412m_enc"
)
"""By ``architecture``."""
