"""Shape and arithmetic of the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: its sizes, its layers and the type of its parameters."""

    transformer_impl: str = field(
        "auto",
        choices=("auto", "native", "transformer_engine"),
        aliases={"local": "native"},
        help="Layer backend: Transformer Engine where it can run, the PyTorch one elsewhere (auto),"
        " or one of them by name. `local` means native.",
    )
    num_layers: int | None = field(
        help="Number of transformer layers.", fallback="24, with the whole default model"
    )
    hidden_size: int | None = field(
        help="Width of the residual stream.", fallback="1024, with the whole default model"
    )
    ffn_hidden_size: int | None = field(
        help="Width of the MLP between its two matrices.",
        fallback="4 * hidden_size, or int((4 * hidden_size * 2 / 3) / 64) * 64 with --swiglu",
    )
    num_attention_heads: int | None = field(
        help="Number of attention (query) heads.", fallback="16, with the whole default model"
    )
    kv_channels: int | None = field(
        help="Width of one attention head.", fallback="hidden_size / num_attention_heads"
    )
    group_query_attention: bool = field(
        False, help="Let several query heads share one key and value head."
    )
    num_query_groups: int | None = field(
        help="Number of key and value heads; read only with --group-query-attention.",
        fallback="1 with --group-query-attention, else num_attention_heads",
    )
    seq_length: int | None = field(
        help="Tokens in one training sequence.",
        units="tokens",
        fallback="max_position_embeddings, or 1024",
    )
    max_position_embeddings: int | None = field(
        help="Longest position the model can represent.",
        units="tokens",
        fallback="seq_length",
    )
    position_embedding_type: str = field(
        "learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        help="How the model sees positions.",
    )
    rotary_base: int = field(10000, help="Base of the rotary frequencies.")
    rotary_percent: float = field(
        1.0, help="Share of each head's channels that is rotated, above 0 and at most 1."
    )
    rotary_seq_len_interpolation_factor: int | None = field(
        None, help="Divide all positions by this (linear interpolation of a longer context)."
    )
    use_rope_scaling: bool = field(
        False, help="Stretch the rotary frequencies as Llama 3.1 does (low 1, high 4, 8192 tokens)."
    )
    rope_scaling_factor: float = field(
        8.0, help="How far --use-rope-scaling stretches the low frequencies."
    )
    normalization: str = field(
        "LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Kind of normalization."
    )
    norm_epsilon: float = field(1e-5, help="Added to the variance inside every normalization.")
    apply_layernorm_1p: bool = field(
        False, help="Store normalization weights around zero: the factor is 1 + weight."
    )
    qk_layernorm: bool = field(
        False, help="Normalize queries and keys per head before the attention product."
    )
    swiglu: bool = field(False, help="Gated MLP: silu(gate) * up.")
    squared_relu: bool = field(False, help="MLP activation relu(x)^2 instead of GELU.")
    add_bias_linear: bool = field(
        True, flags="--disable-bias-linear", help="Biases in the linear layers."
    )
    add_qkv_bias: bool = field(
        False, help="Bias of the QKV layer, also where --disable-bias-linear drops the others."
    )
    untie_embeddings_and_output_weights: bool = field(
        False, help="Give the output layer its own weight instead of the word embedding's."
    )
    make_vocab_size_divisible_by: int = field(
        128, help="Pad the vocabulary to a multiple of this times the tensor-parallel size."
    )
    padded_vocab_size: int | None = field(
        help="Rows of the word embedding.",
        fallback="vocab_size padded by --make-vocab-size-divisible-by",
    )
    hidden_dropout: float = field(0.1, help="Dropout probability of the residual branches.")
    attention_dropout: float = field(0.1, help="Dropout probability of the attention weights.")
    init_method_std: float = field(
        0.02, help="Standard deviation of the normal initialization of weights."
    )
    fp16: bool = field(False, help="Parameters and activations in float16.")
    bf16: bool = field(False, help="Parameters and activations in bfloat16.")
    params_dtype: str = field(
        "float32",
        derived=True,
        help="Type of the model's parameters: bfloat16, float16 or float32.",
    )
