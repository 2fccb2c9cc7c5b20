"""FP8 that starts later, and FP8 that goes on after a restart: bit for bit the same training."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8 import DelayedScaling, Fp8Policy, Fp8State
from megatron.training import precision
from tests.trained_parts import advance, build, fetch, store, weights

DELAYED = {"fp8_format": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
MIXED = """rules:
  - {module: "*.mlp.linear_fc2", layers: 1, recipe: bf16}
  - {module: "*.linear_qkv", fprop: bf16}
  - {module: "*.mlp.*", recipe: mxfp8, format: e4m3, wgrad: bf16}
  - {layers: 1, format: e4m3}
"""
PRECISIONS = {
    "bf16": {},
    "delayed": DELAYED,
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "mixed": {**DELAYED, "fp8_policy": MIXED},
    "experts": {**DELAYED, "num_experts": 4},
    "attention": {**DELAYED, "fp8_dot_product_attention": True},
    "weights": {**DELAYED, "fp8_param_gather": True, "use_distributed_optimizer": True},
    "nvfp4": {"fp4_format": "e2m1"},
}
IN_FP8 = {name: fields for name, fields in PRECISIONS.items() if fields}


class Run:
    """A small model in training."""

    def __init__(self, root=None, **fields):
        folders = {} if root is None else {"save": str(root), "load": str(root)}
        self.cfg, self.mesh, self.parts, self.step = build(0, 1, bf16=True, **folders, **fields)

    def advance(self, first, count):
        return advance(self.cfg, self.parts, self.step, first, count)

    def store(self, iteration):
        store(self.cfg, self.mesh, self.parts, iteration)

    def fetch(self):
        return fetch(self.cfg, self.mesh, self.parts)

    def assert_same_state(self, other):
        ours, theirs = (weights(run.mesh, run.parts) for run in (self, other))
        assert all((ours[name] == theirs[name]).all() for name in theirs)
        for book, expected in zip(self.parts.fp8.books, other.parts.fp8.books, strict=True):
            assert torch.equal(book.history, expected.history)
            assert torch.equal(book.scale, expected.scale)


@pytest.mark.parametrize("fields", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, fields):
    straight = Run(**fields)
    expected = straight.advance(1, 4)
    first = Run(tmp_path, **fields)
    done = first.advance(1, 2)
    first.store(2)
    second = Run(tmp_path, **fields)
    assert not [line for line in second.fetch() if "FP8 state" in line]
    assert done + second.advance(3, 2) == expected
    second.assert_same_state(straight)


@pytest.mark.parametrize("fields", IN_FP8.values(), ids=IN_FP8.keys())
def test_a_warm_up_is_a_bf16_run_that_was_restarted_in_fp8(tmp_path, fields):
    straight = Run(**fields, fp8_warmup_iters=2)
    expected = straight.advance(1, 4)
    experts = {k: v for k, v in fields.items() if k == "num_experts"}
    plain = Run(tmp_path, **experts)
    assert plain.advance(1, 2) == expected[:2]
    plain.store(2)
    restarted = Run(tmp_path, **fields)
    said = [line for line in restarted.fetch() if "FP8 state" in line]
    assert said
    assert restarted.advance(3, 2) == expected[2:]
    restarted.assert_same_state(straight)
    longer = Run(**fields, fp8_warmup_iters=3)
    assert longer.advance(1, 4)[2] != expected[2]  # so it matters which iteration it is


@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_warm_up_is_resumed_before_at_and_after_its_end(tmp_path, saved_at):
    fields = {**DELAYED, "fp8_warmup_iters": 2}
    straight = Run(**fields)
    expected = straight.advance(1, 4)
    first = Run(tmp_path, **fields)
    first.advance(1, saved_at)
    first.store(saved_at)
    second = Run(tmp_path, **fields)
    second.fetch()
    assert second.advance(saved_at + 1, 4 - saved_at) == expected[saved_at:]
    second.assert_same_state(straight)


def test_the_first_fp8_step_quantizes_with_scale_one():
    run = Run(**DELAYED, fp8_warmup_iters=2)
    run.advance(1, 2)
    book = run.parts.fp8.book
    assert not book.history.any()
    run.advance(3, 1)
    assert (book.scale[: book.scale.numel() // 2] != 1).any()


SHORT = DelayedScaling(amax_history_len=2)


def state_of(warmup_iters, recipe=SHORT):
    state = Fp8State(Fp8Policy(recipe=recipe), warmup_iters=warmup_iters)
    state.for_linear("decoder.layers.0.a")
    return state


def test_when_fp8_is_on():
    state = state_of(2)
    switched = [(i, state.begin(i), state.enabled) for i in (0, 1, 2, 3, 4)]
    assert switched == [
        (0, False, False), (1, False, False), (2, False, False), (3, True, True), (4, False, True)
    ]  # fmt: skip
    state.begin(2)  # back, as after a rollback
    assert state.is_warming_up
    always = state_of(0)
    assert [always.begin(i) for i in (0, 1)] == [False, False]
    assert always.enabled
    never = state_of(2, recipe=None)
    assert not never.begin(3)
    assert not never.is_warming_up


def test_the_table_says_from_when_on_and_that_is_no_fallback():
    state = state_of(2)
    state.begin(0)
    row = state.rows()[0]
    assert (row.requested, row.delivered) == ("fp8 e4m3xe4m3 delayed", "bf16")
    assert row.reason == "in FP8 from iteration 3 (--fp8-warmup-iters 2)"
    precision.refuse_fallback(state.rows())
    state.begin(3)
    assert state.rows()[0].delivered == "fp8 e4m3xe4m3 delayed"


@pytest.mark.parametrize(
    ("first", "second", "said", "kept"),
    [
        ({"fp8_amax_history_len": 8}, {}, "saved with an amax history of 8, running 4", True),
        ({"fp8_amax_history_len": 2}, {}, "zero rows are added", True),
        ({"fp8_format": "e4m3"}, {}, "scales were converted", True),
        ({"fp8_recipe": "tensorwise"}, {}, "this run uses delayed; it is dropped", False),
        ({"fp8_recipe": "tensorwise"}, {"fp8_policy": MIXED}, "scales start at 1", False),
        ({"fp8_policy": MIXED}, {}, "saved with delayed e4m3, this run uses delayed hybrid", True),
        (None, {}, "the checkpoint has none", False),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)
def test_other_settings_after_a_restart(tmp_path, first, second, said, kept):
    delayed_only = {"fp8_format": "hybrid"} if (first or {}).get("fp8_recipe") else DELAYED
    before = Run(tmp_path, **({} if first is None else {**delayed_only, **first}))
    before.advance(1, 3)
    before.store(3)
    after = Run(tmp_path, **{**DELAYED, **second})
    lines = after.fetch()
    assert any(said in line for line in lines), lines
    state, path = after.parts.fp8, "decoder.layers.1.self_attention.linear_proj"
    found = state.book.history[:, state.book.columns(path, "forward")]
    assert bool(found.any()) == kept
    if kept:
        old = before.parts.fp8.book
        saved = old.history[:, old.columns(path, "forward")]
        rows = min(len(saved), 4) - 1  # the newest ones, below the row that is being filled
        newest = saved[-rows:]
        there = found[1 : rows + 1] if len(saved) < 4 else found[-rows:]
        assert torch.equal(there, newest)
    after.advance(4, 1)
