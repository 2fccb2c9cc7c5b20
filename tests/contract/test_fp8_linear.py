"""The linear layer in every precision: what it computes, what it saves, what it accumulates."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
    linear,
)
from megatron.core.fp8.hardware import verdict

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed-e4m3": DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
    "tensorwise": Float8CurrentScaling(),
    "tensorwise-e4m3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "tensorwise-pow2": Float8CurrentScaling(power_2_scale=True),
    "blockwise": Float8BlockScaling(),
    "blockwise-f32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8-hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    # Rounded at random it is tested in test_nvfp4_linear.py.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4-1d": NVFP4BlockScaling(True, True, True),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
# On a CPU torch multiplies operands with one scale.
IN_HARDWARE = {
    name: recipe
    for name, recipe in RECIPES.items()
    if verdict(recipe, torch.device("cpu"), torch.bfloat16).hardware
}
HARDWARE_RECIPES = pytest.mark.parametrize("recipe", IN_HARDWARE.values(), ids=IN_HARDWARE.keys())


def make(recipe, *, emulation="exact", wgrad=True, dtype=torch.bfloat16, hardware=False):
    state = Fp8State(Fp8Policy(recipe=recipe, wgrad=wgrad), emulation=emulation, params_dtype=dtype)
    state.hardware = hardware
    return state, state.for_linear("decoder.layers.0.fc")


def parameters(out=32, inner=48, dtype=torch.bfloat16, seed=0, main_grad=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(out, inner, generator=generator).to(dtype))
    bias = torch.nn.Parameter(torch.randn(out, generator=generator).to(dtype))
    if main_grad:
        for p in (weight, bias):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return weight, bias


def inputs(seed=1, dtype=torch.bfloat16, shape=(6, 4, 48)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def fake_quantize(x, scale, fmt):
    """Quantize and read back with torch's own casts, independent of the kernels."""
    q = (x.detach().float() * scale).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype).double()
    return q / scale.double()


def block_scale(amax, recipe, fmt):
    """The scale of a block whose magnitude is an ordinary number."""
    exact = fmt.max / amax.double()
    if getattr(recipe, "use_f32_scales", False):
        return exact.float()
    return torch.exp2(torch.floor(torch.log2(exact))).float()


def fake_quantize_blocks(x, recipe, role):
    """Quantize and read back, one block along a row (or one square) after the other."""
    fmt, out = recipe.format_of(role), torch.empty(x.shape, dtype=torch.float64)
    high = recipe.length if role is Role.WEIGHT and isinstance(recipe, Float8BlockScaling) else 1
    for r, c in itertools.product(range(0, x.shape[0], high), range(0, x.shape[1], recipe.length)):
        part = (slice(r, r + high), slice(c, c + recipe.length))
        scale = block_scale(x[part].detach().abs().max(), recipe, fmt)
        out[part] = fake_quantize(x[part], scale, fmt)
    return out


def fake_quantize_nvfp4(x, high):
    """Quantize and read back blocks of 16 in a row, or of 16 x 16, with torch's own casts."""
    values = x.detach().float()
    grid = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # even codes first: argmin takes the first
    scale = torch.tensor(2688.0) / values.abs().max()
    out = torch.empty(x.shape, dtype=torch.float64)
    for r, c in itertools.product(range(0, x.shape[0], high), range(0, x.shape[1], 16)):
        part = (slice(r, r + high), slice(c, c + 16))
        block = (values[part].abs().max() * (scale * (1 / 6))).to(torch.float8_e4m3fn).float()
        v = (values[part] * (1 / (block * (1 / scale)))).clamp(-6, 6)
        code = (v.abs().unsqueeze(-1) - grid).abs().argmin(-1)
        out[part] = grid[code].double() * v.sign() * block / scale
    return out


def mixed(x):
    """Each 16 rows times the Hadamard matrix, with zeros for those that are missing."""
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    rows = F.pad(x.detach().double(), (0, 0, 0, -x.shape[0] % 16))
    out = (h * signs / 4).double() @ rows.view(-1, 16, x.shape[1])
    return out.view(-1, x.shape[1]).to(x.dtype)


def nvfp4_operands(recipe, role, x):
    """As `operands`."""
    if role is Role.WEIGHT:
        high = 1 if recipe.disable_2d_quantization else 16
        return fake_quantize_nvfp4(x, high), fake_quantize_nvfp4(x.t(), high)
    columns = x if recipe.disable_rht else mixed(x)
    return fake_quantize_nvfp4(x, 1), fake_quantize_nvfp4(columns.t(), 1)


def operands(recipe, precision, role, x):
    """`x` as the left or right operand of a product along its columns, and along its rows."""
    if isinstance(recipe, NVFP4BlockScaling):
        return nvfp4_operands(recipe, role, x)
    if isinstance(recipe, DelayedScaling | Float8CurrentScaling):
        if isinstance(recipe, DelayedScaling):
            scale = precision.slots.of(role).scale.clone()
        else:
            scale = recipe.scale(x.detach().abs().max().float(), recipe.format_of(role).max)
        once = fake_quantize(x, scale, recipe.format_of(role))
        return once, once.t()
    along_rows = fake_quantize_blocks(x.t(), recipe, role)
    return fake_quantize_blocks(x, recipe, role), along_rows


def reference(x, weight, bias, dy, recipe, precision):
    """Forward and gradients in fp64 from tensors that were quantized and read back."""
    rows, flat = x.detach().reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    x_row, x_col = operands(recipe, precision, Role.INPUT, rows)
    w_row, w_col = operands(recipe, precision, Role.WEIGHT, weight)
    d_row, d_col = operands(recipe, precision, Role.GRAD_OUTPUT, flat)
    y = (x_row @ w_row.t() + bias.detach().double()).view(*x.shape[:-1], -1)
    return y, (d_row @ w_col.t()).view(x.shape), d_col @ x_col.t(), flat.double().sum(0)


@EVERY_RECIPE
@pytest.mark.parametrize("emulation", ["fast", "exact"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_forward_and_gradients(recipe, emulation, main_grad):
    state, precision = make(recipe, emulation=emulation)
    weight, bias = parameters(main_grad=main_grad)
    for step in range(3):  # step 0 of delayed scaling runs with scale 1
        x = inputs(seed=step)
        dy = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(9)).bfloat16() * 1e-3
        want_y, want_dx, want_dw, want_db = reference(x, weight, bias, dy, recipe, precision)
        y = linear(x, weight, bias, precision)
        y.backward(dy)
        got_dw = weight.main_grad if main_grad else weight.grad
        got_db = bias.main_grad if main_grad else bias.grad
        # bf16 results of an fp32 sum: half a unit, plus one unit where fast rounds twice.
        for got, want in ((y, want_y), (x.grad, want_dx), (got_dw, want_dw), (got_db, want_db)):
            torch.testing.assert_close(
                got.double(), want, rtol=2.0**-7, atol=2.0**-7 * want.abs().max().item() / 16
            )
        weight.grad = bias.grad = None
        for p in (weight, bias) if main_grad else ():
            assert p.grad_added_to_main_grad
            p.main_grad.zero_()
        state.sync()


@EVERY_RECIPE
def test_main_grad_accumulates_over_microbatches(recipe):
    state, precision = make(recipe)
    weight, bias = parameters(main_grad=True)
    batches = [(inputs(seed=s), torch.randn(6, 4, 32).bfloat16()) for s in range(3)]
    singles = []
    for x, dy in batches:
        weight.main_grad.zero_()
        linear(x, weight, bias, precision).backward(dy)
        singles.append(weight.main_grad.clone())
    weight.main_grad.zero_()
    for i, (x, dy) in enumerate(batches):
        # The hint never makes a microbatch overwrite what earlier ones accumulated.
        linear(x, weight, bias, precision, is_first_microbatch=i == 0).backward(dy)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, sum(singles), rtol=1e-5, atol=1e-4)


@EVERY_RECIPE
def test_bias_gradient_is_the_sum_of_the_unquantized_gradient(recipe):
    _, precision = make(recipe)
    weight, bias = parameters()
    dy = torch.randn(6, 4, 32).bfloat16()
    linear(inputs(), weight, bias, precision).backward(dy)
    assert torch.equal(bias.grad, dy.view(-1, 32).sum(0))


def test_first_forward_saturates_at_scale_one():
    _, precision = make(RECIPES["delayed"])
    weight = torch.nn.Parameter(torch.eye(16).bfloat16())
    x = torch.zeros(1, 16).bfloat16()
    x[0, 3] = 920.0
    assert linear(x, weight, None, precision)[0, 3] == 448.0


def test_meta_has_the_shapes_that_monitoring_code_expects():
    state, precision = make(RECIPES["delayed"])
    state.for_linear("decoder.layers.1.fc")
    weight, bias = parameters()
    x = inputs()
    linear(x, weight, bias, precision).sum().backward()
    meta = precision.fp8_meta
    assert meta["scaling_fwd"].amax_history.shape == (4, 3)
    assert meta["scaling_bwd"].amax_history.shape == (4, 2)
    assert meta["scaling_fwd"].scale.shape == (3,)
    assert meta["scaling_fwd"].amax_history[0, 0] == x.abs().max()
    assert meta["scaling_fwd"].amax_history[0, 1] == weight.abs().max()
    assert meta["scaling_bwd"].amax_history[0, 0] == 1
    state.sync()
    forward = meta["scaling_fwd"]
    assert (forward.amax_history[0] == 0).all()
    assert forward.amax_history[-1, 0] == x.abs().max()
    assert forward.amax_history[:, 2].abs().max() == 0  # no FP8 output
    assert forward.scale[2] == 1
    assert torch.equal(forward.scale_inv, 1 / forward.scale)
    assert (meta["fp8_max_fwd"], meta["fp8_max_bwd"]) == (448, 57344)
    forward.scale.fill_(2.0)  # a live view
    assert precision.slots.of(Role.INPUT).scale == 2.0
    assert "scaling_fwd" not in make(RECIPES["tensorwise"])[1].fp8_meta


def test_backward_uses_the_input_as_the_forward_quantized_it():
    state, precision = make(RECIPES["delayed"])
    weight, bias = parameters()
    grads = []
    for sync_between in (False, True):
        state.book.scale.fill_(1.0)
        state.book.history.zero_()
        weight.grad = None
        y = linear(inputs(), weight, bias, precision)
        dy_slot = precision.slots.of(Role.GRAD_OUTPUT)
        if sync_between:
            state.sync()
            state.book.scale[dy_slot.index()] = 1.0
        y.backward(torch.ones_like(y))
        grads.append(weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_do_not_depend_on_the_number_of_microbatches(algorithm):
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    results = []
    for count in (1, 2, 4):
        state, precision = make(recipe)
        weight, bias = parameters(main_grad=True)
        for step in range(3):
            weight.main_grad.zero_()
            x = inputs(seed=step, shape=(8, 48)).detach()
            dy = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            for part, dy_part in zip(x.chunk(count), dy.chunk(count), strict=True):
                linear(part, weight, bias, precision).backward(dy_part)
            state.sync()
        results.append((state.book.scale.clone(), state.book.history.clone(), weight.main_grad))
    for scale, history, gradient in results[1:]:
        assert torch.equal(scale, results[0][0])
        assert torch.equal(history, results[0][1])
        torch.testing.assert_close(gradient, results[0][2], rtol=1e-5, atol=1e-4)


# -- weight cache ---------------------------------------------------------------------------


def weight_casts(precision, monkeypatch):
    """Counts the casts of the weight."""
    count, quantizer = [0], precision.quantizer(Role.WEIGHT)
    original = quantizer.cast

    def counting(x, **kwargs):
        count[0] += 1
        return original(x, **kwargs)

    monkeypatch.setattr(quantizer, "cast", counting)
    return count


@EVERY_RECIPE
def test_weight_is_quantized_once_a_step(recipe, monkeypatch):
    state, precision = make(recipe)
    weight, bias = parameters()
    count = weight_casts(precision, monkeypatch)
    for _ in range(3):
        linear(inputs(), weight, bias, precision)
    assert count == [1]
    state.sync()
    linear(inputs(), weight, bias, precision)
    assert count == [2]


@EVERY_RECIPE
@pytest.mark.parametrize("hint", [None, True, False])
def test_a_changed_weight_is_never_served_from_the_cache(recipe, hint, monkeypatch):
    _, precision = make(recipe)
    weight, bias = parameters()
    count = weight_casts(precision, monkeypatch)
    x = inputs()
    before = linear(x, weight, bias, precision, is_first_microbatch=hint)
    with torch.no_grad():
        weight.mul_(0.5)
    after = linear(x, weight, bias, precision, is_first_microbatch=hint)
    assert count == [2]
    assert not torch.equal(before, after)
    other = torch.nn.Parameter(weight.detach().clone())  # same values, another tensor
    linear(x, other, bias, precision, is_first_microbatch=hint)
    assert count == [3]


def test_hints_on_the_cache(monkeypatch):
    state, precision = make(RECIPES["delayed"])
    weight, bias = parameters()
    count = weight_casts(precision, monkeypatch)
    linear(inputs(), weight, bias, precision, is_first_microbatch=True)
    state.sync()
    linear(inputs(), weight, bias, precision, is_first_microbatch=False)
    assert count == [1]  # earlier scales will do
    linear(inputs(), weight, bias, precision, is_first_microbatch=True)
    assert count == [2]


def test_weight_magnitude_counts_once_it_is_recorded_for_training():
    state, precision = make(RECIPES["delayed"])
    weight, bias = parameters()
    with state.not_recording():  # an evaluation fills the cache first
        linear(inputs(), weight, bias, precision)
    assert state.book.history[0].abs().max() == 0
    linear(inputs(), weight, bias, precision)
    assert state.book.history[0, precision.slots.of(Role.WEIGHT).index()] == weight.abs().max()


# -- other precisions -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("main_grad", [False, True])
def test_high_precision_is_the_ordinary_linear_layer(dtype, main_grad):
    state = Fp8State.disabled(params_dtype=dtype)
    precision = state.for_linear("fc")
    weight, bias = parameters(dtype=dtype, main_grad=main_grad)
    x, dy = inputs(dtype=dtype), torch.randn(6, 4, 32).to(dtype)
    y = linear(x, weight, bias, precision)
    y.backward(dy)
    exact = F.linear(x.double(), weight.double(), bias.double())
    rows, flat = x.detach().double().view(-1, 48), dy.double().view(-1, 32)
    # One rounding of each result; bias sums of 24 terms and fp16 products a little more.
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[dtype]
    dw = weight.main_grad if main_grad else weight.grad
    db = bias.main_grad if main_grad else bias.grad
    for got, want in (
        (y, exact),
        (x.grad.view(-1, 48), flat @ weight.double()),
        (dw, flat.t() @ rows),
        (db, flat.sum(0)),
    ):
        want = want.detach()
        atol = unit * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    assert y.dtype == dtype
    assert precision.row().delivered == {2: "bf16", 4: "fp32"}[
        2 if dtype != torch.float32 else 4
    ] or (dtype == torch.float16 and precision.row().delivered == "fp16")


@EVERY_RECIPE
def test_no_fp8_wgrad_keeps_the_weight_gradient_in_high_precision(recipe):
    _, precision = make(recipe, wgrad=False)
    weight, bias = parameters(main_grad=True)
    x, dy = inputs(), torch.randn(6, 4, 32).bfloat16()
    linear(x, weight, bias, precision).backward(dy)
    want = dy.view(-1, 32).double().t() @ x.detach().view(-1, 48).double()
    tolerance = 2.0**-8 * want.abs().max().item()
    torch.testing.assert_close(weight.main_grad.double(), want, rtol=0, atol=tolerance)
    rows = {row.gemm: row for row in precision.rows()}
    assert rows["wgrad"].delivered == rows["wgrad"].requested == "bf16"
    assert rows["wgrad"].reason == "--no-fp8-wgrad"
    assert rows["dgrad"].delivered.startswith(recipe.family)


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parameters_of_other_types(recipe, dtype):
    _, precision = make(recipe, dtype=dtype)
    weight, bias = parameters(dtype=dtype)
    x = inputs(dtype=dtype)
    y = linear(x, weight, bias, precision)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    relative = (y - F.linear(x, weight, bias)).norm() / y.norm()
    # Two operands of about 2.6 percent noise each in E4M3, of 10 percent in E2M1.
    assert relative < (0.2 if recipe.family == "fp4" else 0.06)


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_fp32_input_of_a_fused_norm(name):
    state, precision = make(RECIPES[name])
    weight, bias = parameters()
    x = inputs(dtype=torch.float32)
    y = linear(x, weight, bias, precision)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    assert precision.wants_fp32_norm == (name == "delayed")
    if name == "delayed":
        recorded = state.book.history[0, precision.slots.of(Role.INPUT).index()]
        assert recorded == x.detach().abs().max()  # of the fp32 value
        assert recorded != x.detach().abs().max().bfloat16()
    state.enabled = False
    assert not precision.wants_fp32_norm


@EVERY_RECIPE
def test_zero_tensors_stay_zero(recipe):
    state, precision = make(recipe)
    weight, bias = parameters()
    with torch.no_grad():
        weight.zero_()
        bias.zero_()
    for _ in range(2):
        x = inputs()
        with torch.no_grad():
            x[2:4].zero_()
        y = linear(x, weight, bias, precision)
        y.backward(torch.zeros_like(y))
        for got in (y, x.grad, weight.grad, bias.grad):
            assert got.abs().max() == 0
        state.sync()


@EVERY_RECIPE
def test_zero_rows_of_the_input_give_the_bias(recipe):
    _, precision = make(recipe)
    weight, bias = parameters()
    x = inputs()
    with torch.no_grad():
        x[1].zero_()
    y = linear(x, weight, bias, precision)
    assert torch.equal(y[1], bias.expand(4, 32))


@EVERY_RECIPE
def test_no_tokens(recipe):
    state, precision = make(recipe)
    weight, bias = parameters(main_grad=True)
    x = inputs(shape=(0, 48))
    y = linear(x, weight, bias, precision)
    y.sum().backward()
    assert y.shape == (0, 32)
    assert x.grad.shape == (0, 48)
    assert weight.main_grad.abs().max() == 0
    if state.book is not None:
        assert state.book.history[0, precision.slots.of(Role.INPUT).index()] == 0


@EVERY_RECIPE
def test_nan_and_infinity_are_not_hidden(recipe):
    _, precision = make(recipe)
    weight, bias = parameters()
    x = inputs()
    with torch.no_grad():
        x[0, 0, 0] = float("nan")
    y = linear(x, weight, bias, precision)
    assert torch.isnan(y[0, 0]).all()
    assert not torch.isnan(y[1:]).any()


@pytest.mark.parametrize(("grad_x", "grad_w"), list(itertools.product([True, False], repeat=2)))
def test_only_wanted_gradients_are_computed(grad_x, grad_w):
    state, precision = make(RECIPES["delayed"])
    weight, bias = parameters()
    weight.requires_grad_(grad_w)
    bias.requires_grad_(True)
    x = inputs().detach().requires_grad_(grad_x)
    y = linear(x, weight, bias, precision)
    y.sum().backward()
    assert (x.grad is not None) == grad_x
    assert (weight.grad is not None) == grad_w
    assert bias.grad is not None
    recorded = state.book.history[0, precision.slots.of(Role.GRAD_OUTPUT).index()].item()
    assert (recorded > 0) == (grad_x or grad_w)


@EVERY_RECIPE
def test_recomputation_is_bitwise_and_records_nothing(recipe):
    from megatron.core.tensor_parallel.random import checkpoint

    results = []
    for recompute in (False, True):
        state, precision = make(recipe)
        weight, bias = parameters(main_grad=True)
        for step in range(3):
            x = inputs(seed=step)
            with torch.no_grad():
                x.mul_(10.0**step)

            def layer(x, precision=precision, weight=weight, bias=bias):
                return linear(F.gelu(x), weight, bias, precision)

            y = checkpoint(layer, x, fp8=state) if recompute else layer(x)
            y.backward(torch.ones_like(y))
            state.sync()
        book = [] if state.book is None else [state.book.history.clone(), state.book.scale.clone()]
        results.append([y.detach(), x.grad, weight.main_grad, bias.main_grad, *book])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_recomputation_after_an_update_uses_the_scales_of_the_first_forward():
    """Pipelines recompute late; should scales have moved, the first forward's still apply."""
    from megatron.core.tensor_parallel.random import checkpoint

    state, precision = make(RECIPES["delayed"])
    weight, bias = parameters()
    seen = []

    def layer(x):
        y = linear(x, weight, bias, precision)
        seen.append(y.detach().clone())
        return y * y

    x = inputs()
    out = checkpoint(layer, x, fp8=state)
    state.sync()
    history = state.book.history.clone()
    state.enabled = False  # nor does the switch matter
    out.sum().backward()
    assert torch.equal(*seen)
    forward = slice(0, 3)
    assert torch.equal(state.book.history[:, forward], history[:, forward])
    assert not state.enabled


# -- hardware -------------------------------------------------------------------------------


def scaled_mm_on_cpu():
    """Whether this torch runs `_scaled_mm` on a CPU, where the GPU's code path can be tried."""
    x = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    try:
        torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.skipif(not scaled_mm_on_cpu(), reason="this torch has no _scaled_mm for CPU")
@HARDWARE_RECIPES
@pytest.mark.parametrize(("tokens", "inner", "out"), [(32, 48, 64), (30, 40, 24), (1, 8, 8)])
@pytest.mark.parametrize("wgrad", [True, False])
def test_fp8_type_and_scaled_mm_give_what_the_emulation_gives(recipe, tokens, inner, out, wgrad):
    results = []
    for hardware in (False, True):
        state, precision = make(recipe, hardware=hardware, wgrad=wgrad)
        weight, bias = parameters(out, inner, main_grad=True)
        for step in range(2):
            x = inputs(seed=step, shape=(tokens, inner))
            dy = torch.randn(tokens, out, generator=torch.Generator().manual_seed(3)).bfloat16()
            y = linear(x, weight, bias, precision)
            y.backward(dy)
            state.sync()
        book = [] if state.book is None else [state.book.scale.clone()]
        results.append([y.detach(), x.grad, weight.main_grad, bias.main_grad, *book])
    assert "_scaled_mm" in precision.row().kernel
    for emulated, real in zip(*results, strict=True):
        torch.testing.assert_close(real, emulated, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "nvfp4"])
def test_block_scales_are_emulated_on_fp8_hardware_and_the_table_says_so(name):
    results = []
    for hardware in (False, True):
        _, precision = make(RECIPES[name], hardware=hardware)
        weight, bias = parameters(main_grad=True)
        y = linear(inputs(), weight, bias, precision)
        y.sum().backward()
        results.append((y.detach(), weight.main_grad, precision.row()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2].reason == ""
    assert results[1][2].kernel.startswith("emulated")
    blocks = "no products with scales of blocks on cpu"
    why = "torch multiplies no operands with such scales" if name == "nvfp4" else blocks
    assert why in results[1][2].reason
    assert not results[1][2].is_fallback


@pytest.mark.gpu
@EVERY_RECIPE
@pytest.mark.parametrize(("tokens", "inner", "out"), [(256, 128, 512), (30, 40, 24)])
def test_gpu_gives_what_the_cpu_gives(recipe, tokens, inner, out):
    results = []
    for device in ("cpu", "cuda"):
        state = Fp8State(Fp8Policy(recipe=recipe), emulation="exact", device=device)
        precision = state.for_linear("decoder.layers.0.fc")
        weight, bias = (torch.nn.Parameter(p.detach().to(device)) for p in parameters(out, inner))
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for step in range(3):
            x = inputs(seed=step, shape=(tokens, inner)).detach().to(device).requires_grad_()
            dy = torch.randn(tokens, out, generator=torch.Generator().manual_seed(3)).bfloat16()
            y = linear(x, weight, bias, precision)
            y.backward(dy.to(device))
            state.sync()
        book = [] if state.book is None else [state.book.history, state.book.scale]
        results.append([t.detach().cpu() for t in (y, x.grad, weight.main_grad, *book)])
    # Fast accumulation of the forward keeps about 14 bits on some devices.
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=2.0**-6, atol=2.0**-7 * cpu.abs().max().item())
