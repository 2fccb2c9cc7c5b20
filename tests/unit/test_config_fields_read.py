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
    "add_qkv_bias": "the QKV layer's bias",
    "bf16": "params_dtype",
    "fp16": "params_dtype",
    "context_parallel_size": "refused above 1",
    "expert_model_parallel_size": "refused above 1",
    "expert_tensor_parallel_size": "refused above 1",
    "pipeline_model_parallel_size": "refused above 1",
    "ckpt_format": "one format",
    "mock_data": "data_path",
    "lr_decay_samples": "the schedule",
}


def names_read(path):
    """Return attribute names and string constants in a file (``getattr``, tables of names)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def unread_fields():
    sources = [*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    sources += [p for p in (ROOT / "megatron").rglob("*.py") if "config" not in p.parts]
    read = set().union(*(names_read(path) for path in sources))
    settable = (name for name, spec in SPECS.items() if not spec.setting.derived)
    return sorted(name for name in settable if name not in read | set(CONSUMED_BY_DERIVATION))


def test_every_field_is_read_somewhere():
    assert unread_fields() == []
