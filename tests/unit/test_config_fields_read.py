"""No setting is parsed and ignored: something outside megatron/config reads every field."""

from __future__ import annotations

import ast
from pathlib import Path

from megatron.config.schema import SPECS

ROOT = Path(__file__).resolve().parents[2]
# Read only while the configuration is finished: they turn into other fields or into an error.
CONSUMED_BY_DERIVATION = {
    "group_query_attention": "num_query_groups",
    "recompute_activations": "recompute_granularity",
    "make_vocab_size_divisible_by": "padded_vocab_size",
    "bf16": "params_dtype",
    "num_layers_per_virtual_pipeline_stage": "placement of layers",
    "num_virtual_stages_per_pipeline_rank": "placement of layers",
    "decoder_first_pipeline_num_layers": "placement of layers",
    "decoder_last_pipeline_num_layers": "placement of layers",
    "account_for_embedding_in_pipeline_split": "placement of layers",
    "account_for_loss_in_pipeline_split": "placement of layers",
    "pipeline_model_parallel_layout": "placement of layers",
    "fake_world_size": "world_size",
    "use_tp_pp_dp_mapping": "order of the axes, which the mesh reads by name",
    "hierarchical_context_parallel_sizes": "levels of an axis, which the mesh reads by name",
    "grad_reduce_in_bf16": "grad_reduce_dtype",
    "rampup_batch_size": "batches()",
    "step_batch_size_schedule": "batches()",
    "decrease_batch_size_if_needed": "batches()",
    "data_args_path": "data_path",
    "per_split_data_args_path": "corpora of each split",
    "moe_layer_freq": "moe_layers()",
    "moe_aux_loss_coeff": "auxiliary_losses()",
}


def names_read(path):
    """Return the attribute names that a file reads."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def unread_fields():
    sources = [*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    sources += [p for p in (ROOT / "megatron").rglob("*.py") if "config" not in p.parts]
    read = set().union(*(names_read(path) for path in sources))
    settable = [name for name, spec in SPECS.items() if not spec.setting.derived]
    assert set(CONSUMED_BY_DERIVATION) <= set(settable)
    return sorted(name for name in settable if name not in read | set(CONSUMED_BY_DERIVATION))


def test_every_field_is_read_somewhere():
    assert unread_fields() == []
