"""The whole model: against HuggingFace, its loss, its shapes, recompute, cached generation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.errors import DataError
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.spec_utils import walk
from megatron.core.transformer.transformer_block import recompute_plan
from tests.small_models import GQA, LLAMA, batch, small_config, small_model, spread_weights

transformers = pytest.importorskip("transformers")


# -- against HuggingFace -----------------------------------------------------------------------


def fused_qkv(q, k, v, groups):
    """Stack separate projections in the order of the fused one: per group its q heads, k, v."""
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def llama_pair(**settings):
    model, build = small_model(**{**LLAMA, **GQA, **settings})
    c = build.config
    rope_scaling = None
    if c.use_rope_scaling:
        rope_scaling = {
            "rope_type": "llama3",
            "factor": c.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.ffn_hidden_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_query_groups,
            rms_norm_eps=c.norm_epsilon,
            rope_theta=float(c.rotary_base),
            rope_scaling=rope_scaling,
            attention_bias=False,
            attn_implementation="eager",
        )
    )
    spread_weights(theirs)
    state, copied = theirs.state_dict(), {}
    for i in range(c.num_layers):
        hf, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
        copied[f"{attention}.linear_qkv.weight"] = fused_qkv(
            *(state[f"{hf}.self_attn.{x}_proj.weight"] for x in "qkv"), c.num_query_groups
        )
        copied[f"{attention}.linear_qkv.layer_norm_weight"] = state[f"{hf}.input_layernorm.weight"]
        copied[f"{attention}.linear_proj.weight"] = state[f"{hf}.self_attn.o_proj.weight"]
        copied[f"{mlp}.linear_fc1.weight"] = torch.cat(
            [state[f"{hf}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        )
        copied[f"{mlp}.linear_fc1.layer_norm_weight"] = state[
            f"{hf}.post_attention_layernorm.weight"
        ]
        copied[f"{mlp}.linear_fc2.weight"] = state[f"{hf}.mlp.down_proj.weight"]
    copied["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    copied["embedding.word_embeddings.weight"] = state["model.embed_tokens.weight"]
    copied["output_layer.weight"] = state["lm_head.weight"]
    load(model, copied)
    return model, build, theirs


def gpt2_pair():
    model, build = small_model(ffn_hidden_size=64)
    c = build.config
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.max_position_embeddings,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_attention_heads,
            n_inner=c.ffn_hidden_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            layer_norm_epsilon=c.norm_epsilon,
            attn_implementation="eager",
        )
    )
    spread_weights(theirs)
    with torch.no_grad():  # its norms are called ln_*
        for name, parameter in theirs.named_parameters():
            if "ln_" in name and name.endswith("weight"):
                parameter.add_(1.0)
    state, copied = theirs.state_dict(), {}
    for i in range(c.num_layers):
        hf, ours = f"transformer.h.{i}", f"decoder.layers.{i}"
        attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
        for kind in ("weight", "bias"):
            # Its Conv1D stores [in, out].
            whole = state[f"{hf}.attn.c_attn.{kind}"].t()
            copied[f"{attention}.linear_qkv.{kind}"] = fused_qkv(
                *whole.chunk(3), c.num_attention_heads
            )
            copied[f"{attention}.linear_qkv.layer_norm_{kind}"] = state[f"{hf}.ln_1.{kind}"]
            copied[f"{attention}.linear_proj.{kind}"] = state[f"{hf}.attn.c_proj.{kind}"].t()
            copied[f"{mlp}.linear_fc1.{kind}"] = state[f"{hf}.mlp.c_fc.{kind}"].t()
            copied[f"{mlp}.linear_fc1.layer_norm_{kind}"] = state[f"{hf}.ln_2.{kind}"]
            copied[f"{mlp}.linear_fc2.{kind}"] = state[f"{hf}.mlp.c_proj.{kind}"].t()
    for kind in ("weight", "bias"):
        copied[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
    copied["embedding.word_embeddings.weight"] = state["transformer.wte.weight"]
    copied["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
    load(model, copied)
    return model, build, theirs


def load(model, values):
    """Copy values by name, each parameter exactly once; the vocabulary may be padded."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name][: len(value)] = value


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}, {"rotary_base": 500}],
)
def test_logits_and_gradients_equal_huggingface_llama(settings):
    check_against_huggingface(*llama_pair(**settings))


def test_logits_and_gradients_equal_huggingface_gpt2():
    check_against_huggingface(*gpt2_pair())


def check_against_huggingface(model, build, theirs):
    tokens, positions, labels = batch(build.config)
    vocab = build.config.vocab_size
    logits = model(tokens, positions)[..., :vocab]
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    losses = model(tokens, positions, labels)
    expected_losses = F.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-4)
    losses.sum().backward()
    expected_losses.sum().backward()
    c = build.config
    embedding = theirs.get_input_embeddings().weight.grad
    compare(model.embedding.word_embeddings.weight.grad[:vocab], embedding)
    layer = model.decoder.layers[0]
    if c.normalization == "RMSNorm":
        hf = theirs.model.layers[0]
        q, k, v = (getattr(hf.self_attn, f"{x}_proj").weight.grad for x in "qkv")
        compare(layer.self_attention.linear_qkv.weight.grad, fused_qkv(q, k, v, 2))
        gate_up = [getattr(hf.mlp, f"{x}_proj").weight.grad for x in ("gate", "up")]
        compare(layer.mlp.linear_fc1.weight.grad, torch.cat(gate_up))
        compare(
            layer.mlp.linear_fc1.layer_norm_weight.grad, hf.post_attention_layernorm.weight.grad
        )
        compare(model.output_layer.weight.grad[:vocab], theirs.lm_head.weight.grad)
    else:
        hf = theirs.transformer.h[0]
        heads = c.num_attention_heads
        qkv = fused_qkv(*hf.attn.c_attn.weight.grad.t().chunk(3), heads)
        compare(layer.self_attention.linear_qkv.weight.grad, qkv)
        compare(layer.self_attention.linear_proj.bias.grad, hf.attn.c_proj.bias.grad)
        compare(layer.mlp.linear_fc1.layer_norm_bias.grad, hf.ln_2.bias.grad)
        positions_grad = theirs.transformer.wpe.weight.grad
        compare(model.embedding.position_embeddings.weight.grad, positions_grad)


def compare(found, expected):
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=2e-5)


# -- shapes of the model -----------------------------------------------------------------------

VARIANTS = [
    {},
    LLAMA,
    {**LLAMA, **GQA, "qk_layernorm": True},
    {"squared_relu": True, "add_bias_linear": False, "add_qkv_bias": True},
    {"normalization": "RMSNorm", "apply_layernorm_1p": True, "position_embedding_type": "none"},
    {"kv_channels": 16, "position_embedding_type": "rope", "rotary_percent": 0.5},
]


@pytest.mark.parametrize("settings", VARIANTS)
def test_every_variant_trains_every_parameter_and_names_them_like_megatron_core(settings):
    model, build = small_model(**settings)
    spread_weights(model)
    tokens, positions, labels = batch(build.config)
    losses = model(tokens, positions, labels)
    assert losses.shape == tokens.shape
    assert losses.dtype == torch.float32
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    names = set(model.state_dict())
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    bias = "decoder.layers.0.self_attention.linear_qkv.bias" in names
    assert bias == (build.config.add_bias_linear or build.config.add_qkv_bias)
    assert ("decoder.layers.0.mlp.linear_fc2.bias" in names) == build.config.add_bias_linear
    assert ("decoder.layers.0.self_attention.q_layernorm.weight" in names) == (
        build.config.qk_layernorm
    )
    assert ("output_layer.weight" in names) == (build.config.untie_embeddings_and_output_weights)


def test_tied_weights_are_one_parameter_with_both_gradients():
    model, build = small_model()
    tokens, positions, labels = batch(build.config)
    weight = model.embedding.word_embeddings.weight
    assert model.shared_embedding_or_output_weight() is weight
    assert model.output_layer.weight is None
    model(tokens, positions, labels).sum().backward()
    unused = [t for t in range(50) if t not in set(tokens.flatten().tolist())]
    assert weight.grad[unused].abs().sum() > 0  # from the output side
    assert weight.grad[50:].abs().sum() == 0  # padding


def test_padding_the_vocabulary_changes_no_loss():
    narrow, build = small_model(make_vocab_size_divisible_by=50)
    wide, _ = small_model(make_vocab_size_divisible_by=128)
    assert narrow.embedding.word_embeddings.weight.shape[0] == 50
    assert wide.embedding.word_embeddings.weight.shape[0] == 128
    inputs = batch(build.config)
    torch.testing.assert_close(narrow(*inputs), wide(*inputs), rtol=1e-6, atol=1e-6)
    untied, _ = small_model(untie_embeddings_and_output_weights=True)
    assert untied.output_layer.weight[:50].abs().min() > 0
    assert untied.output_layer.weight[50:].abs().max() == 0


def test_weights_start_with_a_smaller_spread_where_they_write_to_the_residual():
    model, _ = small_model(hidden_size=128, num_layers=8, init_method_std=0.05)
    layer = model.decoder.layers[3]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert layer.self_attention.linear_proj.weight.std().item() == pytest.approx(0.0125, rel=0.05)


def test_positions_beyond_the_table_are_refused_by_name():
    model, _ = small_model()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(DataError, match="--max-position-embeddings"):
        model(tokens, torch.tensor([[24]]))


def test_restarting_positions_reach_the_embedding():
    model, build = small_model()
    spread_weights(model)
    tokens, positions, _ = batch(build.config)
    mixed = positions.clone()
    mixed[1, 8:] -= 8
    plain, restarted = model(tokens, positions), model(tokens, mixed)
    assert torch.equal(plain[1, :8], restarted[1, :8])
    assert not torch.allclose(plain[1, 8:], restarted[1, 8:])
    torch.testing.assert_close(plain[0], restarted[0])


def test_the_spec_names_every_leaf_and_the_model_follows_it():
    model, _ = small_model(**LLAMA)
    places = dict(walk(model.spec))
    assert "layers.1.self_attention.linear_qkv" in places
    for path, place in places.items():
        if path and "." in path:
            module = model.decoder.get_submodule(path)
            assert type(module) is place.module, path


def test_precision_rows_cover_every_product_and_keep_the_head_out_of_fp8():
    model, _ = small_model(**LLAMA, bf16=True, fp8_format="hybrid", hidden_size=64)
    rows = model.named_precision_rows()
    by_layer = {row.path for row in rows}
    assert "decoder.layers.1.mlp.linear_fc2" in by_layer
    linear = [row for row in rows if ".linear_" in row.path]
    assert len(linear) == 2 * 4 * 3
    assert all("fp8" in row.delivered and not row.is_fallback for row in linear)
    others = [row for row in rows if row not in linear]
    assert [row.path for row in others] == [
        "embedding.word_embeddings",
        *(f"decoder.layers.{i}.self_attention.core_attention" for i in range(2)),
        *["output_layer"] * 3,
    ]
    assert all(row.delivered == "bf16" and row.reason for row in others)


def test_a_layer_without_an_fp8_path_is_a_fallback():
    for fields, falls in (({"fp8_format": "hybrid"}, True), ({}, False)):
        model, _ = small_model(**LLAMA, bf16=True, **fields)
        model.decoder.layers[1].mlp.linear_fc2 = torch.nn.Linear(8, 8)
        (row,) = [r for r in model.named_precision_rows() if r.path.endswith("1.mlp.linear_fc2")]
        assert row.reason == "torch.nn.Linear: no FP8 path"
        assert row.is_fallback == falls


# -- recompute ---------------------------------------------------------------------------------

RECOMPUTE = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
]
PRECISIONS = [
    {"bf16": True},
    {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    {"bf16": True, "fp4_format": "e2m1"},
]
IDS = ["bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]


def two_steps(settings):
    """Losses, gradients and FP8 state of two steps of two microbatches with dropout.

    Both microbatches run forward before either runs backward, and the scales move on in between:
    a replay has to find its own position in the random stream and its own scales.
    """
    model, build = small_model(
        **LLAMA, hidden_size=64, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1, **settings
    )
    seen = []
    for step in range(2):
        model.zero_grad()
        losses = []
        for microbatch in range(2):
            build.rng.position = (step, microbatch)
            losses.append(model(*batch(build.config, seed=2 * step + microbatch)))
        build.fp8.sync()
        seen += [flat(build.fp8.state_dict())]
        for loss in losses:
            loss.sum().backward()
        build.fp8.sync()
        seen += losses + [p.grad.clone() for p in model.parameters()]
    return seen, build.fp8.state_dict()


@pytest.mark.parametrize("precision", PRECISIONS[1:], ids=IDS[1:])
def test_fp8_takes_any_size(precision):
    """No width and no number of tokens is a multiple of 16, of 32 or of 128."""
    sizes = {"hidden_size": 60, "ffn_hidden_size": 100, "seq_length": 31}
    sizes |= {"max_position_embeddings": 31, "micro_batch_size": 1}
    results = []
    for settings in (precision, {"bf16": True}):
        model, build = small_model(**sizes, **settings)
        spread_weights(model, std=0.1)
        for _ in range(2):  # the first step of delayed scaling quantizes with scale 1
            model.zero_grad()
            loss = model(*batch(build.config, rows=1)).mean()
            loss.backward()
            build.fp8.sync()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, gradient), (reference, expected) = results
    assert loss != reference
    assert loss == pytest.approx(reference, rel=1e-2)
    # Two layers of noise: 4 to 8 % a product in FP8, 16 to 25 % in FP4 with stochastic rounding.
    bound = 0.5 if "fp4_format" in precision else 0.2
    assert (gradient - expected).float().norm() < bound * expected.float().norm()


@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
def test_recompute_is_bitwise_equal_to_keeping_activations(precision):
    expected, expected_state = two_steps(precision)
    for recompute in RECOMPUTE:
        found, state = two_steps({**precision, **recompute})
        for one, other in zip(found, expected, strict=True):
            equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert equal, recompute
        assert flat(state) == flat(expected_state), recompute


def flat(state):
    """Nested dicts with tensors as lists, so that `==` compares every value."""
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def test_full_recompute_keeps_fewer_tensors():
    def kept(**settings):
        model, build = small_model(num_layers=4, **settings)
        parameters = {p.data_ptr() for p in model.parameters()}
        total = 0

        def count(x):
            nonlocal total
            total += 0 if x.data_ptr() in parameters else x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model(*batch(build.config))
        return total

    plain, full = kept(), kept(**RECOMPUTE[0])
    assert full < plain / 4
    assert kept(**RECOMPUTE[3]) <= plain


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(0, 5, False)]),
        (RECOMPUTE[3], [(0, 5, False)]),
        (RECOMPUTE[1], [(0, 2, True), (2, 4, True), (4, 5, True)]),
        (RECOMPUTE[2], [(0, 1, True), (1, 2, True), (2, 5, False)]),
    ],
)
def test_recompute_plan(settings, expected):
    config = small_config(num_layers=5, **settings)
    assert list(recompute_plan(config, 5)) == expected


# -- generation --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {**LLAMA, **GQA}, {**LLAMA, "qk_layernorm": True}])
@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 1, 9]])
def test_cached_logits_equal_the_full_forward(settings, pieces):
    model, build = small_model(**settings)
    spread_weights(model)
    model.eval()
    tokens, positions, _ = batch(build.config)
    with torch.no_grad():
        expected = model(tokens, positions)
        cache, found, start = KVCache(16), [], 0
        for size in pieces:
            part = tokens[:, start : start + size]
            found.append(model(part, cache.positions(part), cache=cache))
            start += size
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_a_full_cache_is_refused():
    model, build = small_model()
    tokens, _, _ = batch(build.config)
    cache = KVCache(10)
    with pytest.raises(DataError, match="cache holds 10"):
        model(tokens, cache.positions(tokens), cache=cache)
