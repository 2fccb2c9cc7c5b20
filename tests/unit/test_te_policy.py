"""Policy and warm-up on Transformer Engine: each layer enters a context with its own recipe."""

from __future__ import annotations

import pytest

from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.backends.te_calls import UB_MODES
from megatron.core.errors import PrecisionError
from tests.contract.fake_te import FakeTransformerEngine
from tests.small_models import batch
from tests.unit.test_te_backend import FP8, NEWEST, OLDEST, column, fake_build, gpt, tokens
from tests.unit.test_te_overlap import initialized, start

MIXED = """rules:
  - {module: "*.1.mlp.linear_fc1", recipe: bf16}
  - {module: "*.linear_fc1", recipe: tensorwise, format: e4m3}
"""


@pytest.fixture(params=[OLDEST, NEWEST])
def fake(request):
    return FakeTransformerEngine(request.param)


@pytest.fixture
def newest():
    return FakeTransformerEngine(NEWEST)


def kinds(fake):
    """(enabled, kind of recipe) of every context, in order."""
    name = "pytorch.autocast" if fake.version >= (2, 9) else "pytorch.fp8_autocast"
    key = "recipe" if fake.version >= (2, 9) else "fp8_recipe"
    return [(call["enabled"], call[key].kind) for call in fake.called(name)]


def test_delayed_layers_next_to_others(fake):
    """No context spans two layers, so that recipes mix as the policy says.

    None that is outermost is enabled: the library moves no scales by itself.
    """
    model, build = gpt(TransformerEngineBackend(fake.library), **FP8, fp8_policy=MIXED)
    model(*batch(build.config))
    delayed, current = ("DelayedScaling", "Float8CurrentScaling")
    layers = [delayed, delayed, current, delayed] + [delayed] * 3
    assert kinds(fake) == [(on, kind) for kind in layers for on in (False, True)]
    assert len(build.fp8.book.paths()) == 6
    recipe = model.decoder.layers[0].mlp.linear_fc1.fp8_meta["recipe"]
    assert recipe.fp8_format.name == "E4M3"
    rows = {row.path: row for row in model.named_precision_rows() if row.gemm == "fprop"}
    row = rows["decoder.layers.0.mlp.linear_fc1"]
    assert "tensorwise" in row.kernel
    assert row.reason == "--fp8-policy rule 2: *.linear_fc1"


def test_a_warm_up_enters_no_context(fake):
    build = fake_build(fake, **FP8, fp8_warmup_iters=1, train_iters=2)
    build.fp8.begin(1)
    layer = column(build)
    assert not layer.precision.row().is_fallback
    layer(tokens(rows=7))  # and pads nothing
    assert kinds(fake) == []
    build.fp8.begin(2)
    layer(tokens())
    assert kinds(fake) == [(False, "DelayedScaling"), (True, "DelayedScaling")]
    assert layer.input_scales == [1.0]


def test_what_the_library_cannot_do_is_refused_with_the_rule(newest):
    one = "rules:\n  - {module: '*.0.mlp.linear_fc1', dgrad: bf16}\n"
    with pytest.raises(PrecisionError, match=r"--fp8-policy rule 1: .*2\.0 removed the choice"):
        column(fake_build(newest, **FP8, fp8_policy=one))
    newest.lacking["is_mxfp8_available"] = (False, "needs another device")
    mx = "rules:\n  - {module: '*.0.mlp.linear_fc1', recipe: mxfp8}\n"
    with pytest.raises(PrecisionError, match=r"--fp8-policy rule 1: .*needs another device"):
        column(fake_build(newest, **FP8, fp8_policy=mx))
    wide = "rules:\n  - {module: '*.linear_fc1', recipe: mxfp8}\n"
    newest.lacking.clear()
    with pytest.raises(PrecisionError, match=r"linear_fc1: got 48 outputs.*multiples of 32"):
        column(fake_build(newest, **FP8, fp8_policy=wide), size_out=48)


@pytest.mark.parametrize(
    "settings", [{"fp8_warmup_iters": 1, "train_iters": 2}, {"fp8_policy": MIXED}]
)
def test_buffers_for_layers_in_bf16_too(fake, settings):
    if fake.version < UB_MODES:
        with pytest.raises(PrecisionError, match="--fp8-warmup-iters or --fp8-policy"):
            start(fake, **FP8, **settings)
        return
    start(fake, **FP8, **settings)
    assert [mode.name for mode in initialized(fake)[0]["quantization_modes"]] == ["FP8", "NONE"]
