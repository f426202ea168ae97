"""The settings of tiny models of every registered family, and the classes of their heads."""

from collections.abc import Callable

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # <pad> has id 1, as RoBERTa and MPNet expect
# fmt: off
WORDS = [
    "a", "the", "this", "that", "film", "plot", "story", "actor", "scene", "joke", "is", "was", "feels",
    "looks", "good", "great", "fine", "bad", "dull", "poor", "funny", "sad", "warm", "cold", "long", "short",
    "very", "rather", "not", "never", "always", "and", "but", "with", "without",
]
# fmt: on
COMMON = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 1}
RANGE = 0.3  # far from the usual .02: a random model that hardly moves its states would pass any test
_SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 2}
_WINDOW = 4  # shorter than the texts and than their padding


def _shape(width: int, layers: int) -> dict[str, object]:
    return COMMON | {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 64,
        "initializer_range": RANGE,
    }  # fmt: skip


def _standard(width: int, layers: int) -> dict[str, object]:
    return _shape(width, layers) | {"intermediate_size": 2 * width}


def _decoder(width: int, layers: int) -> dict[str, object]:
    return _standard(width, layers) | _SPECIAL_IDS | {"num_key_value_heads": 1, "head_dim": width // 2}


def _windows(layers: int) -> dict[str, object]:
    """In every layer but the second: settings by position that a wrong one would show."""
    return {"layer_types": ["full_attention" if i == 1 else "sliding_attention" for i in range(layers)]}


def _mixed(width: int, layers: int) -> dict[str, object]:
    return _decoder(width, layers) | _windows(layers) | {"sliding_window": _WINDOW}


def _distilbert(width: int, layers: int) -> dict[str, object]:
    return COMMON | {
        "dim": width, "n_layers": layers, "n_heads": 2, "hidden_dim": 2 * width, "max_position_embeddings": 64,
        "initializer_range": RANGE,
    }  # fmt: skip


def _albert(width: int, layers: int) -> dict[str, object]:
    groups = {"embedding_size": width // 2, "num_hidden_groups": 1, "inner_group_num": 1}
    return _standard(width, layers) | _SPECIAL_IDS | groups


def _deberta(width: int, layers: int) -> dict[str, object]:
    return _standard(width, layers) | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    }  # fmt: skip


def _modernbert(width: int, layers: int) -> dict[str, object]:
    ids = _SPECIAL_IDS | {"cls_token_id": 0, "sep_token_id": 2}
    return _standard(width, layers) | ids | _windows(layers) | {
        "local_attention": _WINDOW, "initializer_cutoff_factor": 2.0,
    }  # fmt: skip


def _opt(width: int, layers: int) -> dict[str, object]:
    sizes = {"ffn_dim": 2 * width, "word_embed_proj_dim": width // 2, "init_std": RANGE}
    return _shape(width, layers) | _SPECIAL_IDS | sizes


def _t5(width: int, layers: int) -> dict[str, object]:
    return COMMON | {
        "d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_layers": layers, "num_decoder_layers": 1,
        "num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "eos_token_id": 2,
        "decoder_start_token_id": 1, "initializer_factor": 2.0,
    }  # fmt: skip


def _xlnet(width: int, layers: int) -> dict[str, object]:
    shape = {"d_model": width, "n_layer": layers, "n_head": 2, "d_inner": 2 * width}
    return COMMON | _SPECIAL_IDS | shape | {"initializer_range": RANGE}


_Settings = Callable[[int, int], dict[str, object]]
_Heads = dict[str | None, str]


def _encoder(prefix: str) -> _Heads:
    return _heads(prefix) | {"masked": f"{prefix}ForMaskedLM"}


def _causal(prefix: str, head: str = "ForCausalLM") -> _Heads:
    return _heads(prefix) | {"causal": prefix + head}


def _heads(prefix: str) -> _Heads:
    return {None: f"{prefix}Model", "classification": f"{prefix}ForSequenceClassification"}


# By `model_type`: settings, and the classes by what their head answers. One line for every registered family.
KINDS: dict[str, tuple[_Settings, _Heads]] = {
    "albert": (_albert, _encoder("Albert")),
    "bert": (_standard, _encoder("Bert")),
    "deberta-v2": (_deberta, _encoder("DebertaV2")),
    "distilbert": (_distilbert, _encoder("DistilBert")),
    "electra": (lambda w, n: _standard(w, n) | {"embedding_size": w // 2}, _encoder("Electra")),
    "gemma2": (_mixed, _causal("Gemma2")),
    "gemma3_text": (
        _mixed,
        _causal("Gemma3") | {None: "Gemma3TextModel", "classification": "Gemma3TextForSequenceClassification"},
    ),
    "gpt2": (lambda w, n: _shape(w, n) | _SPECIAL_IDS | {"n_inner": 2 * w}, _causal("GPT2", "LMHeadModel")),
    "gpt_neox": (lambda w, n: _standard(w, n) | _SPECIAL_IDS, _causal("GPTNeoX")),
    "llama": (_decoder, _causal("Llama")),
    "mistral": (lambda w, n: _decoder(w, n) | {"sliding_window": _WINDOW}, _causal("Mistral")),
    "modernbert": (_modernbert, _encoder("ModernBert")),
    "mpnet": (_standard, _encoder("MPNet")),
    "openai-gpt": (lambda w, n: _shape(w, n), _causal("OpenAIGPT", "LMHeadModel")),
    "opt": (_opt, _causal("OPT")),
    "phi": (lambda w, n: _standard(w, n) | _SPECIAL_IDS, _causal("Phi")),
    "qwen2": (lambda w, n: _mixed(w, n) | {"use_sliding_window": True}, _causal("Qwen2")),
    "qwen3": (lambda w, n: _mixed(w, n) | {"use_sliding_window": True}, _causal("Qwen3")),
    "roberta": (lambda w, n: _standard(w, n) | {"type_vocab_size": 1}, _encoder("Roberta")),
    "t5": (_t5, _heads("T5") | {None: "T5EncoderModel"}),
    "xlm-roberta": (lambda w, n: _standard(w, n) | {"type_vocab_size": 1}, _encoder("XLMRoberta")),
    "xlnet": (_xlnet, _heads("XLNet")),
}


def _fixed(base: _Settings = _decoder, **settings: object) -> _Settings:
    return lambda width, layers: base(width, layers) | settings


def _moe(**settings: object) -> _Settings:
    """Experts, 2 of 4 for each token; a family without its own name for the number has one of these."""
    return _fixed(num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=16, **settings)


def _lm(prefix: str, body: str = "Model") -> _Heads:
    return {None: prefix + body, "causal": f"{prefix}ForCausalLM"}


_ALL = {"num_experts": 4, "num_local_experts": 4}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_expand": 2,
    "mamba_chunk_size": 8, "mamba_n_groups": 1,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3,
}  # fmt: skip
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
_PLAIN = _fixed(_shape, **_SPECIAL_IDS)
_NARROW = _fixed(_standard, type_vocab_size=1)


def _mamba(width: int, layers: int) -> dict[str, object]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "initializer_range": RANGE}
    return COMMON | _SPECIAL_IDS | sizes | {"state_size": 4, "intermediate_size": 2 * width, "conv_kernel": 3}


def _mamba2(width: int, layers: int) -> dict[str, object]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "initializer_range": RANGE}
    state = {"num_heads": 4, "head_dim": width // 2, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    return COMMON | _SPECIAL_IDS | sizes | state


def _mpt(width: int, layers: int) -> dict[str, object]:
    sizes = {"d_model": width, "n_heads": 2, "n_layers": layers, "expansion_ratio": 2, "initializer_range": RANGE}
    return COMMON | _SPECIAL_IDS | sizes


def _xglm(width: int, layers: int) -> dict[str, object]:
    sizes = {"d_model": width, "attention_heads": 2, "num_layers": layers, "ffn_dim": 2 * width, "init_std": RANGE}
    return COMMON | _SPECIAL_IDS | sizes | {"max_position_embeddings": 64}


def _gemma4(width: int, layers: int) -> dict[str, object]:
    kinds = ["sliding_attention", *["full_attention"] * (layers - 1)]  # the last must be one
    return _mixed(width, layers) | {
        "hidden_size_per_layer_input": 0, "global_head_dim": width // 2, "layer_types": kinds,
    }  # fmt: skip


_PICTURES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "depth": 1, "num_heads": 2, "num_position_embeddings": 4, "head_dim": 8,
}  # fmt: skip


def _pictured(prefix: str) -> _Heads:
    return {None: f"{prefix}Model", "causal": f"{prefix}ForConditionalGeneration"}


# Of three layers, which `tests/contracts/families.py` runs through all that a family must hold, once.
ALIKE: dict[str, tuple[_Settings, _Heads]] = {
    "apertus": (_decoder, _lm("Apertus")),
    "bamba": (_fixed(attn_layer_indices=[1], **_MAMBA), _lm("Bamba")),
    "biogpt": (_fixed(_standard, **_SPECIAL_IDS), _causal("BioGpt")),
    "bloom": (_PLAIN, _causal("Bloom")),
    "camembert": (_NARROW, _encoder("Camembert")),
    "cohere": (_decoder, _lm("Cohere")),
    "cohere2": (_mixed, _lm("Cohere2")),
    "deberta": (_fixed(_deberta, max_relative_positions=8), _encoder("Deberta")),
    "deepseek_v2": (_moe(**_SHARED, **_LATENT), _causal("DeepseekV2")),
    "deepseek_v3": (_moe(**_SHARED, **_LATENT), _causal("DeepseekV3")),
    "ernie": (_standard, _encoder("Ernie")),
    "ernie4_5": (_decoder, _lm("Ernie4_5")),
    "ernie4_5_moe": (_moe(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1), _lm("Ernie4_5_Moe")),
    "esm": (_standard, _encoder("Esm")),
    "eurobert": (_decoder, _encoder("EuroBert")),
    "exaone4": (_mixed, _causal("Exaone4")),
    "falcon": (_fixed(_shape, ffn_hidden_size=32, **_SPECIAL_IDS), _causal("Falcon")),
    "falcon_h1": (_fixed(mamba_d_ssm=32, **_MAMBA), _lm("FalconH1")),
    "falcon_mamba": (_mamba, _lm("FalconMamba")),
    "gemma": (_decoder, _causal("Gemma")),
    "gemma3": (
        lambda w, n: {"text_config": _mixed(w, n), "vision_config": _PICTURES},
        _pictured("Gemma3") | {"classification": "Gemma3ForSequenceClassification"},
    ),
    "gemma4": (
        lambda w, n: {"text_config": _gemma4(w, n), "vision_config": _PICTURES | {"position_embedding_size": 16}},
        _pictured("Gemma4"),
    ),
    "gemma4_text": (_gemma4, _lm("Gemma4", "TextModel")),
    "glm": (_decoder, _causal("Glm")),
    "glm4": (_decoder, _causal("Glm4")),
    "glm4_moe": (_moe(**_SHARED), _lm("Glm4Moe")),
    "gpt_bigcode": (_fixed(_shape, n_inner=32, **_SPECIAL_IDS), _causal("GPTBigCode")),
    "gpt_neo": (
        _fixed(_PLAIN, intermediate_size=32, window_size=_WINDOW, attention_types=[[["global", "local", "global"], 1]]),
        _causal("GPTNeo"),
    ),
    "gpt_oss": (_fixed(_mixed, num_local_experts=4, num_experts_per_tok=2, intermediate_size=16), _causal("GptOss")),
    "gptj": (_fixed(_PLAIN, rotary_dim=4, n_inner=32), _causal("GPTJ")),
    "granite": (_fixed(residual_multiplier=0.5), _lm("Granite")),
    "granitemoe": (_moe(num_local_experts=4, residual_multiplier=0.5), _lm("GraniteMoe")),
    "granitemoehybrid": (
        _moe(layer_types=["mamba", "attention", "mamba"], num_local_experts=4, shared_intermediate_size=16, **_MAMBA),
        _lm("GraniteMoeHybrid"),
    ),
    "gte": (_standard, _encoder("Gte")),
    "jamba": (
        _moe(
            num_experts=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=4,
            mamba_d_conv=3,
            use_mamba_kernels=False,
        ),
        _causal("Jamba"),
    ),
    "jina_embeddings_v3": (_NARROW, _encoder("JinaEmbeddingsV3")),
    "lfm2": (_fixed(block_auto_adjust_ff_dim=False, **_CONVOLUTIONS), _lm("Lfm2")),
    "lfm2_moe": (_moe(num_experts=4, num_dense_layers=1, **_CONVOLUTIONS), _lm("Lfm2Moe")),
    "mamba": (_mamba, _lm("Mamba")),
    "mamba2": (_mamba2, _lm("Mamba2")),
    "megatron-bert": (_standard, _encoder("MegatronBert")),
    "ministral": (_mixed, _causal("Ministral")),
    "ministral3": (_decoder, _causal("Ministral3")),
    "mixtral": (_moe(**_ALL), _causal("Mixtral")),
    "modernbert-decoder": (_modernbert, _causal("ModernBertDecoder")),
    "mpt": (_mpt, _causal("Mpt")),
    "mt5": (_t5, {None: "MT5EncoderModel"}),
    "nemotron": (_decoder, _causal("Nemotron")),
    "nemotron_h": (
        _moe(
            layers_block_type=["mamba", "attention", "moe"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=1,
            conv_kernel=3,
            chunk_size=8,
            n_routed_experts=4,
            moe_shared_expert_intermediate_size=16,
            use_mamba_kernels=False,
        ),
        _lm("NemotronH"),
    ),
    "nomic_bert": (_standard, _encoder("NomicBert")),
    "olmo": (_decoder, _causal("Olmo")),
    "olmo2": (_decoder, _causal("Olmo2")),
    "olmo3": (_mixed, _causal("Olmo3")),
    "olmo_hybrid": (_fixed(**_DELTA), _lm("OlmoHybrid")),
    "olmoe": (_moe(**_ALL), _lm("Olmoe")),
    "phi3": (_decoder, _causal("Phi3")),
    "phimoe": (_moe(**_ALL), _causal("Phimoe")),
    "qwen2_moe": (_moe(shared_expert_intermediate_size=16, **_ALL), _causal("Qwen2Moe")),
    "qwen3_5": (
        lambda w, n: {
            "text_config": _fixed(**_DELTA)(w, n),
            "vision_config": _PICTURES | {"out_hidden_size": w, "patch_size": 2},
        },
        _pictured("Qwen3_5") | {"classification": "Qwen3_5ForSequenceClassification"},
    ),
    "qwen3_5_moe_text": (_moe(shared_expert_intermediate_size=16, **_ALL, **_DELTA), _lm("Qwen3_5Moe", "TextModel")),
    "qwen3_5_text": (
        _fixed(**_DELTA),
        _lm("Qwen3_5", "TextModel") | {"classification": "Qwen3_5TextForSequenceClassification"},
    ),
    "qwen3_moe": (_moe(**_ALL), _causal("Qwen3Moe")),
    "qwen3_next": (_moe(shared_expert_intermediate_size=16, **_ALL, **_DELTA), _causal("Qwen3Next")),
    "rembert": (_fixed(_standard, input_embedding_size=8, output_embedding_size=8), _encoder("RemBert")),
    "roformer": (_fixed(_standard, embedding_size=8), _encoder("RoFormer")),
    "seed_oss": (_decoder, _causal("SeedOss")),
    "smollm3": (_fixed(no_rope_layers=[1, 0, 1]), _causal("SmolLM3")),
    "stablelm": (_decoder, _causal("StableLm")),
    "starcoder2": (_fixed(sliding_window=_WINDOW), _causal("Starcoder2")),
    "t5gemma": (
        lambda w, n: COMMON | {"encoder": _mixed(w, n), "decoder": _mixed(w, n), "is_encoder_decoder": False},
        {None: "T5GemmaEncoderModel"},
    ),
    "umt5": (_t5, {None: "UMT5EncoderModel"}),
    "xglm": (_xglm, _lm("XGLM")),
    "xlm-roberta-xl": (_NARROW, _encoder("XLMRobertaXL")),
    "xmod": (_fixed(_NARROW, languages=["en_XX"], default_language="en_XX"), _encoder("Xmod")),
}

# Where the norms of a block are that come after an addition; all other families norm what goes into a sub-layer.
AFTER = {
    "albert": ("albert_layers.0.attention.LayerNorm", "albert_layers.0.full_layer_layer_norm"),
    "distilbert": ("sa_layer_norm", "output_layer_norm"),
    "mpnet": ("attention.LayerNorm", "output.LayerNorm"),
    "openai-gpt": ("ln_1", "ln_2"),
    "xlnet": ("rel_attn.layer_norm", "ff.layer_norm"),
    **dict.fromkeys(
        (
            "bert",
            "camembert",
            "deberta",
            "deberta-v2",
            "electra",
            "ernie",
            "rembert",
            "roberta",
            "roformer",
            "xlm-roberta",
        ),
        ("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    **dict.fromkeys(("gte", "jina_embeddings_v3", "nomic_bert"), ("post_attention_layernorm", "post_mlp_layernorm")),
}
