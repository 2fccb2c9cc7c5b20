"""The library API: contexts, their updates, recomputation, modules."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core import fp8
from megatron.core.errors import PrecisionError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    LayerNormLinear,
    Linear,
    autocast,
)

E4M3 = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)
OTHER = DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)


def layer(cls=Linear, size=16, seed=0, **kwargs):
    torch.manual_seed(seed)
    return cls(size, size, params_dtype=torch.bfloat16, **kwargs)


def rows(amax=1.0, size=16):
    """An input whose largest magnitude is `amax`."""
    x = torch.linspace(-amax, amax, 4 * size).view(4, size)
    return x.bfloat16().requires_grad_()


def history(module, column=0, which="fwd"):
    return module.fp8_meta[f"scaling_{which}"].amax_history[:, column].tolist()


def scale(module, column=0, which="fwd"):
    return module.fp8_meta[f"scaling_{which}"].scale[column].item()


def step(module, amax, recipe=E4M3, **kwargs):
    with autocast(recipe=recipe, **kwargs):
        y = module(rows(amax))
    y.sum().backward()


# -- updates --------------------------------------------------------------------------------------


def test_forward_scales_advance_at_the_exit():
    module = layer()
    with autocast(recipe=E4M3):
        module(rows(2.0))
        assert history(module) == [2, 0, 0, 0]
        assert scale(module) == 1
    assert history(module) == [0, 0, 0, 2]
    assert scale(module) == 224


def test_under_no_grad_magnitudes_wait_for_the_next_training_step():
    module = layer()
    step(module, 8.0)
    with torch.no_grad(), autocast(recipe=E4M3):
        module(rows(16.0))
    assert scale(module) == 56
    step(module, 1.0)
    assert scale(module) == 28
    assert history(module)[-1] == 16


def test_outputs_change_only_in_the_next_context():
    module = layer()
    with autocast(recipe=E4M3):
        first, same = module(rows(0.01)), module(rows(0.01))
    with autocast(recipe=E4M3):
        second = module(rows(0.01))
    assert torch.equal(first, same)
    assert not torch.equal(first, second)


def test_backward_scales_advance_once_after_the_module_that_ran_first():
    first, second = layer(seed=1), layer(seed=2)
    with autocast(recipe=E4M3):
        middle = first(rows())
        out = second(middle)
    gradient = torch.ones_like(out) * 2
    (out * 2).sum().backward()
    for module in (first, second):
        assert history(module, which="bwd")[0] == 0
        assert history(module, which="bwd")[-1] > 0
    assert scale(second, which="bwd") == 448 / gradient.max()


def test_backward_of_a_later_module_alone_updates_nothing():
    first, second = layer(seed=1), layer(seed=2)
    with autocast(recipe=E4M3):
        first(rows())
        out = second(rows())
    out.sum().backward()
    assert history(second, which="bwd") == [1, 0, 0, 0]
    assert scale(second, which="bwd") == 1


def test_frozen_first_module_leaves_the_update_to_the_next():
    frozen, trained = layer(seed=1).requires_grad_(False), layer(seed=2)
    with autocast(recipe=E4M3):
        out = trained(frozen(rows().detach()))
    out.sum().backward()
    assert scale(trained, which="bwd") == 448


def test_input_gets_an_amax_each_microbatch_and_a_hinted_weight_one():
    for hints, want in (([True, False, False], 1), ([None] * 3, 3)):
        module = layer()
        for hint in hints:
            with autocast(recipe=E4M3):
                y = module(rows(), is_first_microbatch=hint)
            y.sum().backward()
        assert sum(value > 0 for value in history(module, 0)) == 3
        assert sum(value > 0 for value in history(module, 1)) == want


def test_an_exception_inside_updates_nothing():
    module = layer()
    with pytest.raises(KeyError), autocast(recipe=E4M3):
        {}[module(rows(2.0))]
    assert scale(module) == 1
    assert not fp8.is_fp8_enabled()


# -- nesting --------------------------------------------------------------------------------------


def test_inner_context_does_not_inherit_and_only_the_outermost_updates():
    module = layer()
    with autocast(recipe=E4M3):
        module(rows(2.0))
        with autocast():
            assert fp8.get_fp8_recipe() == DelayedScaling()
        assert fp8.get_fp8_recipe() == E4M3
        assert scale(module) == 1
        with autocast(recipe=E4M3):
            module(rows(4.0))
        assert scale(module) == 1
    assert scale(module) == 112
    assert history(module) == [0, 0, 0, 4]


def test_disabled_outermost_context_never_updates():
    module = layer()
    with autocast(enabled=False):
        assert not fp8.is_fp8_enabled()
        with autocast(recipe=E4M3):
            assert fp8.is_fp8_enabled()
            module(rows(2.0))
    assert scale(module) == 1
    assert history(module) == [2, 0, 0, 0]


def test_disabled_inside_enabled_runs_in_high_precision():
    module, x = layer(), rows()
    want = torch.nn.functional.linear(x, module.weight, module.bias)
    with autocast(recipe=E4M3):
        with autocast(enabled=False):
            inside = module(x)
        assert not torch.equal(module(x), want)
    assert torch.equal(inside, module(x))
    torch.testing.assert_close(inside, want, rtol=2**-8, atol=2**-8)


def test_the_same_instance_again():
    context = autocast(recipe=E4M3)
    for _ in range(2):  # reusable
        with context:
            pass
    with context, pytest.raises(RuntimeError, match="already open"):
        context.__enter__()
    assert not fp8.is_fp8_enabled()


def test_changing_recipes():
    module = layer()
    for amax in (2.0, 8.0, 4.0):
        step(module, amax)
    step(module, 1.0, Float8CurrentScaling())
    assert "scaling_fwd" not in module.fp8_meta
    step(module, 1.0)
    assert history(module) == [0, 0, 0, 1]  # a class without history has nothing to hand over
    for amax in (2.0, 8.0, 4.0):
        step(module, amax)
    step(module, 1.0, OTHER)
    assert history(module) == [0, 1]
    assert scale(module) == 112  # the window holds 4 and 1


# -- arguments ------------------------------------------------------------------------------------


def test_other_spellings_and_mistakes():
    with autocast(fp8_recipe=E4M3, fp8_group=None):
        assert fp8.get_fp8_recipe() == E4M3
    with pytest.raises(ValueError, match="one spelling"):
        autocast(recipe=E4M3, fp8_recipe=E4M3)
    with pytest.raises(ValueError, match="not an FP8 recipe"):
        autocast(recipe=Format.E4M3)
    with pytest.raises(TypeError):
        autocast(recpie=E4M3)
    available, reason = fp8.is_fp8_available(return_reason=True)
    assert available
    assert reason
    assert fp8.is_fp8_available() is True


# -- recomputation --------------------------------------------------------------------------------


def run_blocks(wrap, outer=True):
    """Three steps of two layers; everything that must not depend on recomputation."""
    modules = [layer(seed=1), layer(LayerNormLinear, seed=2)]
    outputs = []

    def block(x):
        if outer:
            return modules[1](torch.nn.functional.gelu(modules[0](x)))
        with autocast(recipe=E4M3):
            return modules[1](torch.nn.functional.gelu(modules[0](x)))

    for amax in (1.0, 100.0, 0.01):
        x = rows(amax)
        if outer:
            with autocast(recipe=E4M3):
                y = wrap(block, x)
        else:
            y = wrap(block, x)
        y.backward(torch.ones_like(y))
        outputs += [y.detach(), x.grad]
    state = [
        tensor.clone()
        for m in modules
        for which in ("scaling_fwd", "scaling_bwd")
        for tensor in (m.fp8_meta[which].amax_history, m.fp8_meta[which].scale)
    ]
    return outputs + [p.grad for m in modules for p in m.parameters()] + state


@pytest.mark.parametrize("outer", [True, False], ids=["context outside", "context inside"])
def test_checkpoint_is_bitwise_a_plain_call(outer):
    plain = run_blocks(lambda fn, x: fn(x), outer)
    again = run_blocks(fp8.checkpoint, outer)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_checkpoint_recomputes_with_the_scales_of_the_first_forward():
    module, seen = layer(), []

    def block(x):
        y = module(x)
        seen.append(y.detach().clone())
        return y * y

    with autocast(recipe=E4M3):
        out = fp8.checkpoint(block, rows(0.01), use_reentrant=False)
    changed = scale(module)
    assert changed != 1
    out.sum().backward()
    assert torch.equal(*seen)
    assert scale(module) == changed
    assert not fp8.is_fp8_enabled()


def test_two_microbatches_may_be_recomputed_in_any_order():
    def run(wrap, order):
        module = layer()
        losses = []
        for amax in (0.01, 5.0):
            with autocast(recipe=E4M3):
                losses.append((wrap(lambda x: module(x) ** 2, rows(amax))).sum())
        for i in order:
            losses[i].backward()
        return module.weight.grad

    plain = run(lambda fn, x: fn(x), (1, 0))
    assert torch.equal(plain, run(fp8.checkpoint, (1, 0)))


def test_plain_torch_checkpoint_names_the_function_to_use():
    module = layer()
    with autocast(recipe=E4M3):
        out = torch_checkpoint(lambda x: module(x) ** 2, rows(), use_reentrant=False)
    with pytest.raises(PrecisionError, match=r"megatron\.core\.fp8\.checkpoint"):
        out.sum().backward()

    def block(x):
        with autocast(recipe=E4M3):
            return module(x) ** 2

    out = torch_checkpoint(block, rows(), use_reentrant=False)
    with pytest.raises(PrecisionError, match=r"megatron\.core\.fp8\.checkpoint"):
        out.sum().backward()


# -- modules --------------------------------------------------------------------------------------


def test_meta_before_and_after_the_first_forward():
    module = layer()
    assert "scaling_fwd" not in module.fp8_meta
    step(module, 1.0)
    meta = module.fp8_meta
    assert meta["scaling_fwd"].amax_history.shape == (4, 3)
    assert meta["scaling_bwd"].amax_history.shape == (4, 2)
    assert (meta["fp8_checkpoint"], meta["num_gemms"], meta["recipe"]) == (True, 1, E4M3)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_layer_norm_linear_is_norm_then_linear(normalization, centered):
    module = layer(
        LayerNormLinear, normalization=normalization, zero_centered_gamma=centered, bias=False
    )
    assert (module.layer_norm_bias is None) == (normalization == "RMSNorm")
    x = rows(3.0)
    gamma = torch.ones(16)
    functions = {
        "LayerNorm": torch.nn.functional.layer_norm,
        "RMSNorm": torch.nn.functional.rms_norm,
    }
    args = (None, 1e-5) if normalization == "LayerNorm" else (1e-5,)
    normed = functions[normalization](x.float(), (16,), gamma, *args)
    want = normed.bfloat16().float() @ module.weight.float().t()
    torch.testing.assert_close(module(x).float(), want, rtol=2**-8, atol=2**-8)


def test_fused_cast_sees_fp32_with_delayed_and_bf16_with_current_scaling():
    torch.manual_seed(3)
    x = torch.randn(64, 16).bfloat16()
    module = layer(LayerNormLinear)
    fp32 = torch.nn.functional.layer_norm(x.float(), (16,)).abs().max()
    assert fp32 != fp32.bfloat16()
    with autocast(recipe=E4M3):
        delayed = module(x)
    assert history(module)[-1] == fp32
    # The same weights, told to behave as with current scaling, quantize other bits.
    values = torch.nn.functional.layer_norm(x.float(), (16,))
    unrounded = values.to(torch.float8_e4m3fn).float()
    rounded = values.bfloat16().to(torch.float8_e4m3fn).float()
    assert not torch.equal(unrounded, rounded)
    weight = module.weight.float().to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(delayed.float(), unrounded @ weight.t(), rtol=2**-8, atol=1e-4)


def test_state_dict_carries_scales():
    module, fresh = layer(), layer(seed=9)
    for amax in (2.0, 8.0, 4.0):
        step(module, amax)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert fresh.get_extra_state().keys() == module.get_extra_state().keys()
    with torch.no_grad(), autocast(recipe=E4M3):
        assert torch.equal(fresh(rows()), module(rows()))
    assert scale(fresh) == scale(module) == 56


def test_saved_untouched_after_loading():
    module, fresh = layer(), layer()
    step(module, 2.0)
    fresh.load_state_dict(module.state_dict())
    for key, value in module.get_extra_state().items():
        assert torch.equal(value, fresh.get_extra_state()[key])


def test_loading_a_checkpoint_without_fp8():
    plain = torch.nn.Linear(16, 16).bfloat16()
    module = layer()
    result = module.load_state_dict(plain.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def test_copies_have_scales_of_their_own():
    module = layer()
    step(module, 2.0)
    twin = copy.deepcopy(module)
    step(module, 8.0)
    assert scale(module) == 56
    step(twin, 2.0)
    assert history(twin) == [0, 0, 2, 2]


def test_a_dropped_module_gives_its_columns_back():
    recipe = DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3)
    keep = layer()
    step(keep, 2.0, recipe)
    book = keep._precision.slots.book
    for _ in range(3):
        step(layer(), 4.0, recipe)
    assert len(book.paths()) == 1
    step(keep, 2.0, recipe)
    assert book.history.shape[1] <= 10


def test_gradients_go_to_main_grad_where_there_is_one():
    module = layer()
    module.weight.main_grad = torch.zeros(16, 16)
    step(module, 1.0)
    step(module, 1.0)
    assert module.weight.grad is None
    assert module.weight.main_grad.abs().sum() > 0
    assert module.bias.grad is not None


def test_bad_normalization():
    with pytest.raises(ValueError, match="RMSNorm"):
        LayerNormLinear(16, 16, normalization="BatchNorm")
