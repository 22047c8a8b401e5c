"""Write a tiny, deterministic checkpoint with MiniCPM-o 4.5's exact layout.

The folder has every file and every tensor name of the published checkpoint (vision tower, resampler,
audio tower, audio projection, Qwen3 language model; no speech head), at dimensions small enough to run
on a CPU in float32. The values are reproducible: each tensor is drawn from numpy's PCG64 seeded with
the CRC-32 of its name, scaled, and stored as bfloat16. The tokenizer is byte level, with the special
tokens of the real one. The goldens were computed on these very bytes, so a test holds their digest.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LLM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, LLM_FFN = 128, 2, 4, 2, 32, 256
VIS_DIM, VIS_HEADS, VIS_LAYERS, VIS_FFN, IMAGE, PATCH = 144, 2, 2, 288, 980, 14
AUD_DIM, AUD_HEADS, AUD_LAYERS, AUD_FFN, MELS, AUD_POS = 64, 2, 2, 256, 80, 1500
QUERIES, VOCAB = 64, 512

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|spk_bos|>",
    "<|spk_eos|>",
    "<|tts_bos|>",
    "<|tts_eos|>",
    "<|listen|>",
    "<think>",
    "</think>",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if use_tts_template is defined and use_tts_template is true %}<|tts_bos|>{% endif %}{% endif %}"
)


Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, out: int, inp: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, inp), **({f"{name}.bias": (out,)} if bias else {})}


def _norm(name: str, dim: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (dim,), **({f"{name}.bias": (dim,)} if bias else {})}


def _llm_shapes() -> Shapes:
    shapes: Shapes = {
        "llm.model.embed_tokens.weight": (VOCAB, HIDDEN),
        "llm.lm_head.weight": (VOCAB, HIDDEN),
        **_norm("llm.model.norm", HIDDEN, bias=False),
    }
    for i in range(LLM_LAYERS):
        layer = f"llm.model.layers.{i}"
        shapes |= _linear(f"{layer}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, bias=False)
        shapes |= _linear(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, bias=False)
        shapes |= _linear(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, bias=False)
        shapes |= _linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, bias=False)
        shapes |= _norm(f"{layer}.self_attn.q_norm", HEAD_DIM, bias=False)
        shapes |= _norm(f"{layer}.self_attn.k_norm", HEAD_DIM, bias=False)
        shapes |= _linear(f"{layer}.mlp.gate_proj", LLM_FFN, HIDDEN, bias=False)
        shapes |= _linear(f"{layer}.mlp.up_proj", LLM_FFN, HIDDEN, bias=False)
        shapes |= _linear(f"{layer}.mlp.down_proj", HIDDEN, LLM_FFN, bias=False)
        shapes |= _norm(f"{layer}.input_layernorm", HIDDEN, bias=False)
        shapes |= _norm(f"{layer}.post_attention_layernorm", HIDDEN, bias=False)
    return shapes


def _vision_shapes() -> Shapes:
    shapes: Shapes = {
        "vpm.embeddings.patch_embedding.weight": (VIS_DIM, 3, PATCH, PATCH),
        "vpm.embeddings.patch_embedding.bias": (VIS_DIM,),
        "vpm.embeddings.position_embedding.weight": ((IMAGE // PATCH) ** 2, VIS_DIM),
        **_norm("vpm.post_layernorm", VIS_DIM),
    }
    for i in range(VIS_LAYERS):
        layer = f"vpm.encoder.layers.{i}"
        shapes |= _norm(f"{layer}.layer_norm1", VIS_DIM)
        shapes |= _norm(f"{layer}.layer_norm2", VIS_DIM)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}.self_attn.{projection}", VIS_DIM, VIS_DIM)
        shapes |= _linear(f"{layer}.mlp.fc1", VIS_FFN, VIS_DIM)
        shapes |= _linear(f"{layer}.mlp.fc2", VIS_DIM, VIS_FFN)
    return shapes


def _resampler_shapes() -> Shapes:
    return {
        "resampler.query": (QUERIES, HIDDEN),
        "resampler.proj": (HIDDEN, HIDDEN),
        **_linear("resampler.kv_proj", HIDDEN, VIS_DIM, bias=False),
        "resampler.attn.in_proj_weight": (3 * HIDDEN, HIDDEN),
        "resampler.attn.in_proj_bias": (3 * HIDDEN,),
        **_linear("resampler.attn.out_proj", HIDDEN, HIDDEN),
        **_norm("resampler.ln_q", HIDDEN),
        **_norm("resampler.ln_kv", HIDDEN),
        **_norm("resampler.ln_post", HIDDEN),
    }


def _audio_shapes() -> Shapes:
    shapes: Shapes = {
        "apm.conv1.weight": (AUD_DIM, MELS, 3),
        "apm.conv1.bias": (AUD_DIM,),
        "apm.conv2.weight": (AUD_DIM, AUD_DIM, 3),
        "apm.conv2.bias": (AUD_DIM,),
        "apm.embed_positions.weight": (AUD_POS, AUD_DIM),
        **_norm("apm.layer_norm", AUD_DIM),
    }
    for i in range(AUD_LAYERS):
        layer = f"apm.layers.{i}"
        shapes |= _linear(f"{layer}.self_attn.q_proj", AUD_DIM, AUD_DIM)
        shapes |= _linear(f"{layer}.self_attn.k_proj", AUD_DIM, AUD_DIM, bias=False)
        shapes |= _linear(f"{layer}.self_attn.v_proj", AUD_DIM, AUD_DIM)
        shapes |= _linear(f"{layer}.self_attn.out_proj", AUD_DIM, AUD_DIM)
        shapes |= _norm(f"{layer}.self_attn_layer_norm", AUD_DIM)
        shapes |= _norm(f"{layer}.final_layer_norm", AUD_DIM)
        shapes |= _linear(f"{layer}.fc1", AUD_FFN, AUD_DIM)
        shapes |= _linear(f"{layer}.fc2", AUD_DIM, AUD_FFN)
    shapes |= _linear("audio_projection_layer.linear1", HIDDEN, AUD_DIM)
    shapes |= _linear("audio_projection_layer.linear2", HIDDEN, HIDDEN)
    return shapes


def _tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    shift = 0.0
    if "norm" in name or ".ln_" in name:
        scale, shift = 0.05, 0.0 if name.endswith("bias") else 1.0
    elif name.endswith("bias"):
        scale = 0.05
    elif "embed" in name or name == "resampler.query":
        scale = 0.3
    elif name == "llm.lm_head.weight":
        scale = 0.2
    else:
        scale = 0.8 / math.sqrt(math.prod(shape[1:]))
    value = draw * np.float32(scale) + np.float32(shift)  # float32 under every numpy
    return torch.from_numpy(value).to(torch.bfloat16)


GENERATION_CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def _config() -> dict[str, Any]:
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": LLM_FFN,
        "num_hidden_layers": LLM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "query_num": QUERIES,
        "image_size": 448,
        "patch_size": PATCH,
        "drop_vision_last_layer": False,
        "batch_vision_input": True,
        "vision_batch_size": 16,
        "use_image_id": True,
        "slice_mode": True,
        "slice_config": {
            "model_type": "minicpmv",
            "max_slice_nums": 9,
            "scale_resolution": 448,
            "patch_size": PATCH,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": VIS_DIM,
            "image_size": IMAGE,
            "intermediate_size": VIS_FFN,
            "num_attention_heads": VIS_HEADS,
            "num_hidden_layers": VIS_LAYERS,
            "patch_size": PATCH,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        },
        "audio_config": {
            "model_type": "whisper",
            "d_model": AUD_DIM,
            "encoder_layers": AUD_LAYERS,
            "encoder_attention_heads": AUD_HEADS,
            "encoder_ffn_dim": AUD_FFN,
            "num_mel_bins": MELS,
            "max_source_positions": AUD_POS,
            "activation_function": "gelu",
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 128,
        },
        "audio_pool_step": 5,
        "audio_chunk_length": 1.0,
        "stream_input": False,
        "init_vision": True,
        "init_audio": True,
        "init_tts": False,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "MiniCPMVImageProcessor",
        "feature_extractor_type": "MiniCPMAAudioProcessor",
        "processor_class": "MiniCPMOProcessor",
        "max_slice_nums": 9,
        "scale_resolution": 448,
        "patch_size": PATCH,
        "use_image_id": True,
        "image_feature_size": QUERIES,
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "unk": "<unk>",
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
        "slice_mode": True,
        "audio_pool_step": 5,
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
        "version": 4.5,
    }


def _write_tokenizer(out: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {tok: i for i, tok in enumerate(SPECIALS)}
    vocab |= {ch: len(SPECIALS) + i for i, ch in enumerate(letters)}
    # No merge leads to these, so text never encodes to them; they give every id of the
    # model a text of its own (id 300 decodes to " w300").
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_tiny_checkpoint(out: Path) -> None:
    """Write the checkpoint into the folder ``out`` (made if absent, files of the same names replaced)."""
    out.mkdir(parents=True, exist_ok=True)
    shapes = _llm_shapes() | _vision_shapes() | _resampler_shapes() | _audio_shapes()
    tensors = {name: _tensor(name, shape) for name, shape in shapes.items()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors gives it to its owner alone
    _write_json(out / "config.json", _config())
    _write_json(out / "preprocessor_config.json", _preprocessor_config())
    _write_json(out / "generation_config.json", GENERATION_CONFIG)
    _write_tokenizer(out)
