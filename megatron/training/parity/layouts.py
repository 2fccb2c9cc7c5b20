"""Layouts as short texts: ``tp2``, ``pp2vpp2``, ``tp2sp-dp2``, ``pp2:pipeline_schedule=gpipe``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config import RunConfig
from megatron.config.schema import SPECS
from megatron.config.values import nearest
from megatron.core.errors import MeshError, complaint

MAX_RANKS = 8

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "dp": "",  # follows from the number of ranks
}
_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "nosp": {"sequence_parallel": False},
    "distopt": {"use_distributed_optimizer": True},
    "nodistopt": {
        "use_distributed_optimizer": False,
        "overlap_param_gather": False,
        "fp8_param_gather": False,
    },
    "recompute": _FULL_RECOMPUTE,
    "norecompute": {name: None for name in (*_FULL_RECOMPUTE, "recompute_activations")},
}
_WORD = re.compile(
    rf"(?P<axis>{'|'.join(sorted(_AXES, key=len, reverse=True))})(?P<size>\d{{1,9}}(?!\d))"
    rf"|(?P<switch>{'|'.join(sorted(_SWITCHES, key=len, reverse=True))})"
)
# Settings that fit one layout only. Another one starts without them; `account_for_*` and the
# schedule stay, because they fit any number of stages.
BY_HAND = (
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "num_distributed_optimizer_instances",
    "hierarchical_context_parallel_sizes",
)
PLACEMENT = (*(name for name in _AXES.values() if name), *BY_HAND)
# What only shares work out, or only saves memory: one process needs none of it.
_WITHOUT = (
    *PLACEMENT,
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_schedule",
    "use_tp_pp_dp_mapping",
    "cp_comm_type",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "fp8_param_gather",
    "grad_reduce_in_bf16",
    "grad_reduce_dtype",
    "ddp_bucket_size",
    "ddp_num_buckets",
    *_SWITCHES["norecompute"],
)
_OVERLAP_OF_SHARDS = "tp_comm_"  # settings of that name need sequence parallelism
# What a layout's text may set behind a colon besides the section `parallel`: it changes who does
# what and when, and not what is computed.
_BEHIND_A_COLON = (
    "micro_batch_size",
    "moe_token_dispatcher_type",
    "moe_pad_expert_input_to_capacity",
    *_SWITCHES["norecompute"],
    "recompute_modules",
)
# The section's settings that have another place, or no effect on these ranks.
_NOT_BEHIND_A_COLON = (
    "grad_reduce_in_bf16",  # a precision
    "tp_comm_overlap_cfg",
    "tp_comm_bootstrap_backend",
    "distributed_backend",
    "distributed_timeout_minutes",
)
PIPELINE_ONLY = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(frozen=True)
class Layout:
    """How ranks share the work.

    Attributes:
        text: As it was written.
        sizes: Extent of each axis that was named.
        extra: Settings that go with it.
    """

    text: str
    sizes: Mapping[str, int]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Extent of an axis; 1 where the text does not name it, the smallest that fits for dp."""
        if axis == "etp":
            return self.sizes.get("etp", self.size("tp"))
        if axis == "dp":
            return self.sizes.get("dp", self._smallest_dp())
        return self.sizes.get(axis, 1)

    def _smallest_dp(self) -> int:
        """Replicas so that the experts' mesh fills the same ranks as that of the dense layers."""
        if not {"ep", "etp"} & self.sizes.keys():
            return 1
        dense, expert = self.size("tp") * self.size("cp"), self.size("etp") * self.size("ep")
        return expert // math.gcd(expert, dense)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.size("tp") * self.size("cp") * self.size("pp") * self.size("dp")

    def settings(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's settings as this layout has them.

        Args:
            fields: Settings, with or without a placement of their own.
        """
        settings = {k: v for k, v in fields.items() if k not in PLACEMENT}
        if self.size("pp") == 1:
            settings = {k: v for k, v in settings.items() if k not in PIPELINE_ONLY}
        settings |= {_AXES[axis]: size for axis, size in self.sizes.items() if _AXES[axis]}
        if "a2a+p2p" in settings.get("cp_comm_type", ()):
            # Another size has other levels, or none: the result is the same with a plain ring.
            ring = ("p2p" if kind == "a2a+p2p" else kind for kind in settings["cp_comm_type"])
            settings["cp_comm_type"] = tuple(ring)
        if self.size("tp") == 1 or not {**settings, **self.extra}.get("sequence_parallel"):
            settings = without_overlap(settings)
        settings |= self.extra
        return {k: v for k, v in settings.items() if v is not None}

    @property
    def splits_sequence(self) -> bool | None:
        """Whether the text asks for sequence parallelism; None if it leaves that open."""
        return self.extra.get("sequence_parallel")


def one_process(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings for one process that does everything in the plainest way."""
    return without_overlap({k: v for k, v in fields.items() if k not in _WITHOUT})


def without_overlap(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of overlapped tensor-parallel communication."""
    return {k: v for k, v in settings.items() if not k.startswith(_OVERLAP_OF_SHARDS)}


def parse_layout(text: str) -> Layout:
    """Read a layout.

    Args:
        text: Axes with sizes (tp pp cp dp ep etp vpp) and switches (sp distopt recompute, or with
            `no` in front), in any order, with or without `-` between them; behind a colon further
            settings about sharing work, as in ``pp2:pipeline_schedule=gpipe,micro_batch_size=1``.

    Raises:
        MeshError: It cannot be read, or needs more than `MAX_RANKS` ranks.
    """
    words, colon, behind = text.strip().partition(":")
    sizes: dict[str, int] = {}
    extra: dict[str, Any] = {}
    rest = words.lower()
    while rest:
        found = _WORD.match(rest)
        if found is None:
            raise _unreadable(text, rest)
        rest = rest[found.end() :].lstrip("-_")
        if found["switch"]:
            extra |= _SWITCHES[found["switch"]]
            continue
        axis, size = found["axis"], int(found["size"])
        if axis in sizes:
            raise _refused(text, f"It names {axis} twice", "Name every axis once")
        if size < 1:
            raise _refused(text, f"{axis} has no rank", "An axis has at least one")
        sizes[axis] = size
    if not words:
        raise _refused(text, "It names no axis", "Write something like tp2, or dp1 for one process")
    layout = Layout(text.strip(), sizes, extra | (_settings(text, behind) if colon else {}))
    _check(layout)
    return layout


def _settings(text: str, behind: str) -> dict[str, Any]:
    """Read `name=value,name=value`."""
    found: dict[str, Any] = {}
    for item in behind.split(","):
        name, equals, value = item.strip().partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        spec = SPECS.get(name)
        if not equals or spec is None or spec.setting.derived:
            guess = nearest(name, SPECS)
            fix = f"Did you mean {guess}=...?" if guess else "Write name=value as in a YAML file"
            raise _refused(text, f"{item.strip()!r} is no setting with a value", fix)
        _check_belongs_here(text, name)
        is_switch = spec.kind is bool and value.lower() in ("true", "false")
        found[name] = value.lower() == "true" if is_switch else value.strip()
    return found


def _check_belongs_here(text: str, name: str) -> None:
    """Refuse a setting that is not about sharing work: the layout would train something else."""
    axis = next((axis for axis, setting in _AXES.items() if setting == name), None)
    if axis is not None:
        fix = f"Write {axis} with a size in front of the colon"
        raise _refused(text, f"{name} is an axis, and ranks are counted by axes", fix)
    of_layouts = SPECS[name].section == "parallel" and name not in _NOT_BEHIND_A_COLON
    if not of_layouts and name not in _BEHIND_A_COLON:
        why = f"{name} is not about how ranks share the work, so one process would not be its equal"
        raise _refused(text, why, "Set it for all layouts, as a flag")


def _check(layout: Layout) -> None:
    text = layout.text
    if layout.size("vpp") > 1 and layout.size("pp") == 1:
        raise _refused(text, "Only a pipeline has virtual stages", "Add pp2")
    if layout.splits_sequence and layout.size("tp") == 1:
        raise _refused(text, "Sequences are split over the tensor-parallel ranks", "Add tp2")
    if layout.ranks > MAX_RANKS:
        why = f"It needs {layout.ranks} ranks, and this command starts at most {MAX_RANKS}"
        raise _refused(text, why, "Make an axis smaller: a fault in a combination shows with 2")
    dense = layout.size("tp") * layout.size("cp") * layout.size("dp")
    expert = layout.size("etp") * layout.size("ep")
    if ("ep" in layout.sizes or "etp" in layout.sizes) and dense % expert:
        why = f"etp x ep = {expert} does not divide tp x cp x dp = {dense}"
        raise _refused(text, why, "Leave dp out, or choose a multiple")


def _unreadable(text: str, rest: str) -> MeshError:
    why = f"It cannot be read from {rest!r} on" if rest != text.lower() else "It cannot be read"
    word = re.match(r"[a-z]*", rest)
    if word is not None and word[0] in _AXES:
        why = f"{word[0]} has no size" + (" that could be read" if word[0] != rest else "")
    known = f"axes {' '.join(_AXES)} with a size, switches {' '.join(_SWITCHES)}"
    return _refused(text, why, f"Known are {known}")


def _refused(text: str, why: str, fix: str) -> MeshError:
    return MeshError(complaint("--layouts", repr(text), why, fix))


def usual_layouts(cfg: RunConfig) -> list[str]:
    """Return what to try when nobody says: every axis by itself, and the model's own mixture.

    Args:
        cfg: The model's configuration at its own size.
    """
    found = ["dp2", "pp2"]
    heads = cfg.num_attention_heads, cfg.num_query_groups
    if all(count % 2 == 0 for count in heads):
        found += ["tp2", "tp2sp"]
    if cfg.seq_length % 4 == 0:
        found.append("cp2")
    if cfg.num_experts and cfg.num_experts % 2 == 0:
        found += ["ep2", "tp2ep2etp1"]
    own = "".join(
        f"{axis}2"
        for axis, name in _AXES.items()
        if name and axis not in ("etp", "vpp") and (getattr(cfg, name, 1) or 1) > 1
    )
    shared = cfg.expert_tensor_parallel_size
    if cfg.num_experts and shared != cfg.tensor_model_parallel_size:
        own += f"etp{min(2, shared)}"
    if cfg.virtual_pipeline_model_parallel_size > 1:
        own += "vpp2"
    if own and parsed_ranks(own) <= MAX_RANKS and own not in found:
        found.append(own)
    return found


def parsed_ranks(text: str) -> int:
    """Number of ranks of a layout without reading it as a layout that has to fit."""
    sizes = {m["axis"]: int(m["size"]) for m in _WORD.finditer(text) if m["axis"]}
    return Layout(text, sizes).ranks
