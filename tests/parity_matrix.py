"""Every combination of parallel axes and of what changes how they work, against one process.

    make parity                              # all of it
    python tests/parity_matrix.py --only tp2pp2      # cases with these letters in their name

FP32, dropout 0, uneven loss masks. A case trains one step of plain SGD, after which the loss is
within 1e-6 and every global gradient within 1e-5 of one process, and, except with recomputation,
whose effect ends with the gradients, five steps of AdamW with clipping and weight decay, after
which the weights are within 1e-4. CI runs a subset that has every pair of choices in it
(`covering`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from parity import BASE, different, mean_error, run_layout, worst  # noqa: E402
from small_models import LLAMA  # noqa: E402

from megatron.config import make_config  # noqa: E402
from megatron.training.initialize import Launch  # noqa: E402
from megatron.training.parity.outcome import Outcome, fingerprints, train  # noqa: E402
from megatron.training.parity.ranks import RankError, run_ranks  # noqa: E402

MAX_RANKS = 8
LOSS, GRADIENT, WEIGHT = 1e-6, 1e-5, 1e-4  # fp32: the same sums in another order

COMMON: dict[str, Any] = {
    "num_attention_heads": 8,
    "kv_channels": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "ddp_num_buckets": 3,
}
# Weights of the balancing losses are large, so that a wrong factor on one shows in the gradients.
EXPERTS = LLAMA | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": "2",
    "moe_z_loss_coeff": 0.1,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3],
}
MODELS: dict[str, dict[str, Any]] = {"tied": {}, "untied": LLAMA, "experts": EXPERTS}
# Adam makes a full step of a gradient that is zero up to rounding. So there are no biases of linear
# layers (that of the keys has such a gradient), and epsilon is above the rounding errors of the
# others, though far below the gradients themselves.
ADAM = {
    "optimizer": "adam",
    "lr": 1e-2,
    "min_lr": 1e-2,
    "adam_eps": 1e-4,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "add_bias_linear": False,
}
ADAM_STEPS = 5


@dataclass(frozen=True)
class Case:
    """A model at a layout."""

    model: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    vpp: int = 1
    schedule: str = "1f1b"
    dispatcher: str = ""
    distopt: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layers(self) -> int:
        """Two, or one a stage: time goes into messages, of which every layer sends some."""
        return max(2, self.pp * self.vpp)

    @property
    def name(self) -> str:
        axes = ("tp", "pp", "cp", "dp", "ep", "etp")
        words = ["".join(f"{a}{n}" for a in axes if (n := getattr(self, a)) > 1) or "one"]
        words += ["sp"] * self.sp + ["vpp"] * (self.vpp > 1)
        words += [self.schedule] * (self.schedule != "1f1b")
        words += [self.dispatcher] * bool(self.dispatcher) + ["distopt"] * self.distopt
        return "-".join([self.model, *words, *["recompute"] * self.recompute])

    @property
    def choices(self) -> dict[str, Any]:
        """What a covering subset combines."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def settings(self) -> dict[str, Any]:
        """Settings of this layout."""
        found: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sp,
            "use_distributed_optimizer": self.distopt,
            "pipeline_schedule": self.schedule,
        }
        if self.model == "experts":
            found |= {
                "expert_model_parallel_size": self.ep,
                "expert_tensor_parallel_size": self.etp,
                "moe_token_dispatcher_type": self.dispatcher,
            }
        if self.vpp > 1:
            found["num_virtual_stages_per_pipeline_rank"] = self.vpp
        if self.recompute:
            found |= {"recompute_granularity": "full", "recompute_method": "uniform",
                      "recompute_num_layers": 1}  # fmt: skip
        return found


def _variants(case: Case) -> Iterator[Case]:
    """Every way to run at the sizes of `case`."""
    on = (False, True)
    pipelines = [(1, "1f1b")]
    if case.pp > 1:
        pipelines += [(1, "zb-h1")]
    if case.pp == 2:
        pipelines += [(2, "1f1b")]
    for sp, (vpp, schedule), distopt, recompute in itertools.product(
        on if case.tp > 1 else on[:1],
        pipelines,
        on if case.dp * case.cp > 1 else on[:1],
        on,
    ):
        yield replace(case, sp=sp, vpp=vpp, schedule=schedule, distopt=distopt, recompute=recompute)


def _with_experts(case: Case) -> Iterator[Case]:
    """Ways to share experts at the sizes of `case`: half of all combinations.

    Of two that differ in one choice only, one is there, so any few choices still occur together.
    """
    tokens = case.tp * case.cp * case.dp  # ranks with tokens of their own
    sizes = (1, 2, 4) if tokens == 4 and case.pp == 1 else (1, 2)
    for ep, etp in itertools.product(sizes, (1, 2)):
        if tokens % (ep * etp):
            continue
        for variant in _variants(replace(case, model="experts", ep=ep, etp=etp)):
            if variant.schedule != "1f1b":
                continue
            pipelined, shared = variant.vpp > 1, ep > 1
            if (variant.sp + pipelined + variant.distopt + variant.recompute + shared) % 2:
                continue
            turn = (variant.sp + variant.distopt + (etp > 1)) % 2
            yield replace(variant, dispatcher=("allgather", "alltoall")[turn])


def all_cases() -> list[Case]:
    """The whole list, small ones first."""
    found: list[Case] = []
    sizes = list(itertools.product((1, 2), repeat=4))
    sizes += [tuple(4 if i == axis else 1 for i in range(4)) for axis in range(4)]
    for tp, pp, cp, dp in sizes:
        case = Case("", tp, pp, cp, dp)
        if case.ranks > MAX_RANKS:
            continue
        for model in MODELS:
            if model == "experts":
                found += _with_experts(case)
            else:
                found += _variants(replace(case, model=model))
    return sorted(found, key=lambda case: case.ranks)


def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """Every two choices that a case combines."""
    return set(itertools.combinations(sorted(case.choices.items(), key=lambda c: c[0]), 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """A small subset in which every pair of choices occurs that occurs in `cases`.

    Greedy: always the case with the most pairs that are missing for each rank that it needs.
    """
    missing: set[tuple[tuple[str, Any], ...]] = set().union(*(pairs(case) for case in cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing) / (2 + case.ranks))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# -- running ------------------------------------------------------------------------------------


def _trainings(rank: int, world_size: int, *trainings: tuple[dict[str, Any], int]):
    """Train with each of some (settings, steps); only rank 0 returns all that came out."""
    found = []
    for settings, steps in trainings:
        cfg = make_config(world_size, **{**BASE, "train_iters": steps, **settings})
        found.append(train(cfg, Launch(rank, world_size, rank, world_size), steps=steps))
    return found if rank == 0 else None, [fingerprints(one) for one in found]


def _trained(model: str, layers: int, layout: dict[str, Any], ranks: int) -> list[Outcome]:
    plain = COMMON | MODELS[model] | {"num_layers": layers} | layout
    trainings = [(plain, 1)]
    if not layout.get("recompute_granularity"):
        trainings.append((plain | ADAM, ADAM_STEPS))
    results = run_ranks(_trainings, ranks, *trainings, timeout=240, detail=False)
    for rank, (_, prints) in enumerate(results):
        assert prints == results[0][1], f"ranks 0 and {rank} hold different weights"
    return results[0][0]


@cache
def reference(model: str, layers: int) -> list[Outcome]:
    """One process, the plainest way."""
    return _trained(model, layers, {}, 1)


@dataclass(frozen=True)
class Errors:
    """How far a case is from one process."""

    loss: float
    norm: float
    gradient: float
    gradient_of: str
    weight: float
    weight_of: str
    start: float

    @property
    def inside(self) -> bool:
        return (
            self.loss <= LOSS
            and self.norm <= GRADIENT
            and self.gradient <= GRADIENT
            and self.weight <= WEIGHT
            and self.start == 0
        )

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, norm {self.norm:.1e}, gradient {self.gradient:.1e}"
            f" ({self.gradient_of}), weight after AdamW {self.weight:.1e} ({self.weight_of})"
            + (f", INITIAL WEIGHTS {self.start:.1e}" if self.start else "")
        )


def _relative(ours: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))


def measure(case: Case) -> Errors:
    """Train a case and compare it."""
    ours = _trained(case.model, case.layers, case.settings(), case.ranks)
    alone = reference(case.model, case.layers)
    sgd, expected = ours[0], alone[0]
    gradient, gradient_of = worst(sgd.grads, expected.grads)
    weight, weight_of = 0.0, "not trained"
    if len(ours) > 1:
        weight, weight_of = worst(ours[1].final, alone[1].final)
    return Errors(
        loss=_relative(sgd.losses, expected.losses),
        norm=_relative(sgd.grad_norms, expected.grad_norms),
        gradient=gradient,
        gradient_of=gradient_of,
        weight=weight,
        weight_of=weight_of,
        start=worst(sgd.initial, expected.initial)[0],
    )


# -- delayed scaling ----------------------------------------------------------------------------

FP8 = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "max",
    "fp8_emulation": "exact",
    "seq_length": 32,
    "max_position_embeddings": 32,
    # One value on the other side of a boundary of the grid, a step of 6 %, and two trainings part;
    # how fast is a matter of the learning rate.
    "lr": 0.05,
    "min_lr": 0.05,
}
FP8_STEPS = 20
# name -> (model, settings, ranks, whether every scale of the first step is the same bit by bit).
# Where sums are taken in another order a maximum may move by a bit; those of the weights and of the
# first input exist before any sum over ranks.
FP8_LAYOUTS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "tp2": ("tied", {"tensor_model_parallel_size": 2}, 2, False),
    "pp2": ("tied", {"pipeline_model_parallel_size": 2}, 2, True),
    "cp2": ("tied", {"context_parallel_size": 2}, 2, False),
    "dp2": ("tied", {}, 2, True),
    "ep2": ("experts", {"expert_model_parallel_size": 2}, 2, True),
    "ga2": ("tied", {"micro_batch_size": 4}, 1, True),
}


def check_fp8(name: str) -> str:
    """Return what is wrong with the scales or losses of a layout, empty if nothing is."""
    model, settings, ranks, bitwise = FP8_LAYOUTS[name]
    expected = _fp8_alone(model)
    ours = run_layout(FP8 | MODELS[model] | settings, ranks, FP8_STEPS)[0]
    first_layer = "decoder.layers.0.self_attention.linear_qkv"
    moved = different(ours, expected)
    early = {
        (path, key, column)
        for path, key, column in moved
        if key.endswith("fwd") and (column == 1 or (path == first_layer and column == 0))
    }
    wrong = early or different(ours, expected, rtol=1e-6) or (moved if bitwise else set())
    if wrong:
        return f"scales differ: {sorted(wrong)[:3]}"
    error = mean_error(ours, expected)
    return f"mean loss differs by {error:.1e}" if error >= 1e-3 else ""


@cache
def _fp8_alone(model: str) -> Outcome:
    return run_layout(FP8 | MODELS[model], 1, FP8_STEPS)[0]


# -- the whole list -----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--covering", action="store_true", help="the subset that CI runs")
    args = parser.parse_args()
    cases = covering(all_cases()) if args.covering else all_cases()
    cases = [case for case in cases if args.only in case.name]
    started, bad = time.monotonic(), []
    worst_of: dict[str, tuple[float, str]] = {}
    for number, case in enumerate(cases, 1):
        begun = time.monotonic()
        try:
            errors = measure(case)
            inside, text = errors.inside, str(errors)
            for kind in ("loss", "norm", "gradient", "weight"):
                found = (getattr(errors, kind), case.name)
                worst_of[kind] = max(worst_of.get(kind, found), found)
        except (RankError, AssertionError) as error:
            inside, text = False, str(error)
        verdict = "same" if inside else "DIVERGES"
        took = time.monotonic() - begun
        print(f"[{number}/{len(cases)}] {case.name} ({took:.1f} s): {verdict}: {text}", flush=True)
        if not inside:
            bad.append(case.name)
    scaled = [n for n in FP8_LAYOUTS if args.only in f"fp8-{n}" and not args.covering]
    for name in scaled:
        wrong = check_fp8(name)
        print(f"fp8-{name}: {wrong or 'same scales, same losses'}", flush=True)
        bad += [f"fp8-{name}"] if wrong else []
    for kind, (value, name) in worst_of.items():
        print(f"largest {kind} difference: {value:.1e} ({name})")
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{len(bad)} of {len(cases) + len(scaled)} cases diverge or fail ({took})")
    print("".join(f"  {name}\n" for name in bad), end="")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
