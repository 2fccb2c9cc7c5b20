"""Rules about mixture-of-experts layers and their place on the mesh."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.moe import AUXILIARY_LOSSES, layer_pattern
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of

_WITH_EXPERTS = (*(n for n, s in SPECS.items() if s.section == "moe"), "expert_model_parallel_size")
_NO_SUCH_ROUTER = "Remove {0}, or balance with --moe-router-load-balancing-type aux_loss"


def _given(c: Draft, name: str) -> bool:
    return name in c.given and c.given[name] != SPECS[name].default


@rule
def expert_settings_need_experts(c: Draft) -> Iterator[Problem]:
    """Settings of mixture-of-experts layers are given only with --num-experts."""
    if c.num_experts is not None or "num_experts" in c.broken:
        return
    if c.given.get("use_checkpoint_args") and c.load is not None:
        return  # perhaps the checkpoint has experts; asked again when that is known
    changed = [flag_of(n) for n in _WITH_EXPERTS if n != "num_experts" and _given(c, n)]
    if (c.given.get("expert_tensor_parallel_size") or 1) > 1:
        changed.append("--expert-tensor-parallel-size")
    if changed:
        yield Problem(
            tuple(changed),
            "no --num-experts",
            "Without --num-experts every layer has one MLP",
            f"Add --num-experts, or remove {'it' if len(changed) == 1 else 'them'}",
        )


@rule
def expert_numbers_are_in_range(c: Draft) -> Iterator[Problem]:
    """Numbers of experts and widths are at least 1, coefficients are not negative."""
    least: dict[str, float] = {
        "num_experts": 1,
        "moe_ffn_hidden_size": 1,
        "moe_router_topk": 1,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_shared_expert_intermediate_size": 1,
        "moe_router_bias_update_rate": 0,
        "moe_z_loss_coeff": 0,
    }
    for name, bound in least.items():
        value = c.values[name]
        if value is not None and value < bound and name in c.given:
            yield Problem((flag_of(name),), value, f"It must be at least {bound}", "Correct it")
    if "moe_aux_loss_coeff" not in c.broken and any(x < 0 for x in c.moe_aux_loss_coeff):
        got = " ".join(str(x) for x in c.moe_aux_loss_coeff)
        why = "A negative weight would drive the experts' loads apart"
        yield Problem(("--moe-aux-loss-coeff",), got, why, "Give 0 or more")
    if c.moe_router_topk_scaling_factor is not None and c.moe_router_topk_scaling_factor <= 0:
        yield Problem(
            ("--moe-router-topk-scaling-factor",),
            c.moe_router_topk_scaling_factor,
            "It multiplies the experts' weights, which would vanish or change their sign",
            "Give a positive number",
        )
    if c.moe_expert_capacity_factor == 0:
        why = "An expert without capacity sees no token"
        yield Problem(("--moe-expert-capacity-factor",), 0, why, "Give a positive number")
    jitter = c.moe_input_jitter_eps
    if jitter is not None and not 0 <= jitter < 1:
        why = "Inputs are multiplied by numbers from 1 - x to 1 + x"
        yield Problem(("--moe-input-jitter-eps",), jitter, why, "Give at least 0 and below 1")


@rule
def layers_with_experts_exist(c: Draft) -> Iterator[Problem]:
    """--moe-layer-freq describes every layer and leaves at least one with experts."""
    if c.num_experts is None or not c.counts("num_layers") or "moe_layer_freq" in c.broken:
        return
    fix = f"Give a number, or a pattern of {c.num_layers} zeros and ones such as '([0]*1+[1]*3)'"
    try:
        pattern = layer_pattern(c.moe_layer_freq, c.num_layers)
    except ValueError as error:
        yield Problem(("--moe-layer-freq", "--num-layers"), c.moe_layer_freq, str(error), fix)
        return
    if not any(pattern):
        yield Problem(
            ("--moe-layer-freq",),
            c.moe_layer_freq,
            "No layer has experts",
            "Mark one with a 1, or remove --num-experts",
        )


@rule
def experts_suffice(c: Draft) -> Iterator[Problem]:
    """A token goes to at most all experts; groups of experts are equal and suffice."""
    if not c.counts("num_experts", "moe_router_topk"):
        return
    if c.moe_router_topk > c.num_experts:
        yield Problem(
            ("--moe-router-topk", "--num-experts"),
            f"{c.moe_router_topk} and {c.num_experts}",
            "A token goes to each expert at most once",
            f"Set --moe-router-topk to at most {c.num_experts}",
        )
        return
    groups, chosen = c.moe_router_num_groups, c.moe_router_group_topk
    if (groups is None) != (chosen is None):
        yield Problem(
            ("--moe-router-num-groups", "--moe-router-group-topk"),
            "one of them",
            "A token chooses some of the groups, so both numbers are needed",
            "Give both, or neither",
        )
    if not c.counts("moe_router_num_groups", "moe_router_group_topk"):
        return
    topk, flags = c.moe_router_topk, ("--moe-router-num-groups", "--moe-router-group-topk")
    if c.num_experts % groups or chosen > groups:
        yield Problem(
            (*flags, "--num-experts"),
            f"{groups}, {chosen} and {c.num_experts}",
            "Groups are equally large, and a token chooses among them",
            "Choose a number of groups that divides the experts, and at most that many of them",
        )
    elif topk % chosen or topk > chosen * (c.num_experts // groups):
        yield Problem(
            (*flags, "--moe-router-topk"),
            f"{groups}, {chosen} and {topk}",
            f"Groups are ranked by their best {topk} / {chosen} experts, and the chosen ones must"
            f" hold {topk}",
            "Choose a --moe-router-group-topk that divides --moe-router-topk, or fewer groups",
        )


@rule
def router_learns(c: Draft) -> Iterator[Problem]:
    """With one expert a token, softmax weights come from all experts (--moe-router-pre-softmax)."""
    plain = c.moe_router_score_function == "softmax" and not c.moe_router_pre_softmax
    if c.num_experts is None or "sinkhorn" in c.moe_router_load_balancing_type:
        return
    if c.moe_router_topk == 1 and plain:
        yield Problem(
            ("--moe-router-topk", "--moe-router-score-function"),
            "1 and softmax",
            "A softmax over one chosen expert is always 1, so the router would never learn",
            "Add --moe-router-pre-softmax",
        )
    if c.moe_router_pre_softmax and c.moe_router_score_function != "softmax":
        yield Problem(
            ("--moe-router-pre-softmax", "--moe-router-score-function"),
            f"both, with {c.moe_router_score_function}",
            "It says when the softmax is taken, and there is none",
            "Remove --moe-router-pre-softmax",
        )


@rule
def expert_bias_has_scores(c: Draft) -> Iterator[Problem]:
    """--moe-router-enable-expert-bias goes with sigmoid or sqrtsoftplus scores."""
    if c.moe_router_enable_expert_bias and c.moe_router_score_function == "softmax":
        yield Problem(
            ("--moe-router-enable-expert-bias", "--moe-router-score-function"),
            "both, with softmax",
            "The bias is added to scores of one scale for all tokens",
            "Use --moe-router-score-function sigmoid or sqrtsoftplus",
        )
    if _given(c, "moe_router_bias_update_rate") and not c.moe_router_enable_expert_bias:
        yield Problem(
            ("--moe-router-bias-update-rate",),
            c.moe_router_bias_update_rate,
            "There is no bias to move",
            "Add --moe-router-enable-expert-bias, or remove --moe-router-bias-update-rate",
        )


@rule
def balancing_losses_have_weights(c: Draft) -> Iterator[Problem]:
    """There is one --moe-aux-loss-coeff a balancing loss; other ways of balancing stand alone."""
    names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    if c.num_experts is None or c.broken & set(names):
        return
    kinds, weights = c.moe_router_load_balancing_type, c.moe_aux_loss_coeff
    flags = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
    listed = " ".join(kinds) or "nothing"
    alone = [kind for kind in kinds if kind not in AUXILIARY_LOSSES]
    if not kinds or len(set(kinds)) < len(kinds) or (alone and len(kinds) > 1):
        yield Problem(
            flags[:1],
            listed,
            "It names one way of balancing, or several different losses",
            f"Choose one of {', '.join(alone) or 'them'}, or losses only",
        )
        return
    got = f"{listed} and {' '.join(str(x) for x in weights) or 'nothing'}"
    if alone:
        if any(weights):
            why = f"{alone[0]} has no loss that could be weighted"
            yield Problem(flags, got, why, "Remove --moe-aux-loss-coeff")
    elif len(kinds) != len(weights):
        fix = f"Give {len(kinds)} weight{'s' if len(kinds) > 1 else ''}"
        yield Problem(flags, got, "Each loss has a weight of its own", fix)


@rule
def sinkhorn_stands_alone(c: Draft) -> Iterator[Problem]:
    """Sinkhorn has its own scores: no other score function, groups, bias, scaling or capacity."""
    if c.num_experts is None or "sinkhorn" not in c.moe_router_load_balancing_type:
        return
    names = (
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_enable_expert_bias",
        "moe_expert_capacity_factor",
    )
    changed = [flag_of(name) for name in names if c.values[name] != SPECS[name].default]
    if changed:
        yield Problem(
            ("--moe-router-load-balancing-type", *changed),
            f"sinkhorn with {' and '.join(changed)}",
            "Sinkhorn assigns tokens by its own scores, and evenly",
            _NO_SUCH_ROUTER.format(" and ".join(changed)),
        )


@rule
def capacity_settings_need_capacity(c: Draft) -> Iterator[Problem]:
    """Drop policy and padding to capacity go with --moe-expert-capacity-factor."""
    if c.num_experts is None or c.moe_expert_capacity_factor is not None:
        return
    for name in ("moe_token_drop_policy", "moe_pad_expert_input_to_capacity"):
        if _given(c, name):
            yield Problem(
                (flag_of(name),),
                c.values[name] if isinstance(c.values[name], str) else "set",
                "Experts have no capacity: no token is dropped",
                f"Add --moe-expert-capacity-factor, or remove {flag_of(name)}",
            )


@rule
def experts_have_no_biases(c: Draft) -> Iterator[Problem]:
    """--num-experts goes with --disable-bias-linear."""
    if c.num_experts is not None and c.add_bias_linear:
        yield Problem(
            ("--num-experts", "--disable-bias-linear"),
            f"{c.num_experts} experts with biases",
            "The matrices of experts have no biases",
            "Add --disable-bias-linear (--add-qkv-bias keeps that of the QKV layer)",
        )


@rule
def shared_gate_has_an_expert(c: Draft) -> Iterator[Problem]:
    """--moe-shared-expert-gate goes with --moe-shared-expert-intermediate-size."""
    if c.num_experts is None or c.moe_shared_expert_intermediate_size is not None:
        return
    if c.moe_shared_expert_gate:
        yield Problem(
            ("--moe-shared-expert-gate",),
            "set",
            "There is no shared expert",
            "Add --moe-shared-expert-intermediate-size, or remove it",
        )


def _shares(c: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield what is split, over which axis, and why."""
    each = "Each rank holds the same number of {0}"
    yield "num_experts", "expert_model_parallel_size", each.format("experts")
    width = each.format("an expert's inner channels")
    yield "moe_ffn_hidden_size", "expert_tensor_parallel_size", width
    if c.moe_shared_expert_intermediate_size is not None:
        width = each.format("the shared expert's inner channels")
        yield "moe_shared_expert_intermediate_size", "tensor_model_parallel_size", width


@rule
def experts_divide_evenly(c: Draft) -> Iterator[Problem]:
    """Experts split evenly over EP ranks, their widths over ETP ranks, a shared one's over TP."""
    if c.num_experts is None:
        return
    for name, axis, why in _shares(c):
        if not c.counts(name, axis) or c.values[name] % c.values[axis] == 0:
            continue
        size, ranks = c.values[name], c.values[axis]
        yield Problem(
            (flag_of(name), flag_of(axis)),
            f"{size} and {ranks}",
            why,
            f"Set {flag_of(name)} {-(-size // ranks) * ranks}, or another {flag_of(axis)}",
        )


@rule
def expert_mesh_fills_the_world(c: Draft) -> Iterator[Problem]:
    """The number of processes is a multiple of ETP * EP * PP."""
    names = (
        "expert_tensor_parallel_size",
        "expert_model_parallel_size",
        "pipeline_model_parallel_size",
    )
    if c.num_experts is None or not c.counts(*names) or c.world_size < 1:
        return
    etp, ep, pp = (c.values[name] for name in names)
    if c.world_size % (etp * ep * pp):
        yield Problem(
            tuple(flag_of(name) for name in names),
            f"{etp}, {ep} and {pp} on {c.world_size} processes",
            f"One set of all experts needs {etp * ep * pp} processes, and they must divide all",
            f"{c.start(etp * ep * pp)}, or lower a size",
        )


@rule
def tokens_divide_tp(c: Draft) -> Iterator[Problem]:
    """With experts, the sequence splits evenly over tensor-parallel ranks (times CP)."""
    names = ("seq_length", "tensor_model_parallel_size", "context_parallel_size")
    if c.num_experts is None or c.sequence_parallel or not c.counts(*names):
        return  # with --sequence-parallel another rule says it
    ranks = c.tensor_model_parallel_size * c.context_parallel_size
    if c.tensor_model_parallel_size > 1 and c.seq_length % ranks:
        yield Problem(
            ("--seq-length", "--tensor-model-parallel-size", "--num-experts"),
            f"{c.seq_length} and {c.tensor_model_parallel_size}",
            "Each rank routes its own part of the sequence",
            f"Set --seq-length {-(-c.seq_length // ranks) * ranks}",
        )
