"""The table of every setting, collected from the section dataclasses."""

from __future__ import annotations

from megatron.config.batch_size import BatchSizeConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.data_mix import DataMixConfig
from megatron.config.field import Spec, specs_of
from megatron.config.fim import FimConfig
from megatron.config.fp8 import Fp8Config
from megatron.config.fp8_attention import Fp8AttentionConfig
from megatron.config.fp8_dp import Fp8ReplicasConfig
from megatron.config.fp8_guards import Fp8GuardsConfig
from megatron.config.fp8_stats import Fp8StatsConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoeConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RuntimeConfig
from megatron.config.training import TrainingConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "moe": MoeConfig,
    "fp8": Fp8Config,
    "fp8_attention": Fp8AttentionConfig,
    "fp8_guards": Fp8GuardsConfig,
    "fp8_stats": Fp8StatsConfig,
    "parallel": ParallelConfig,
    "fp8_dp": Fp8ReplicasConfig,
    "training": TrainingConfig,
    "batch_size": BatchSizeConfig,
    "data": DataConfig,
    "data_mix": DataMixConfig,
    "fim": FimConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "run": RuntimeConfig,
}


def _collect() -> dict[str, Spec]:
    table: dict[str, Spec] = {}
    for section, cls in SECTIONS.items():
        for spec in specs_of(section, cls):
            if spec.name in table or spec.name in SECTIONS:
                raise TypeError(f"the name {spec.name} is used twice")
            table[spec.name] = spec
    return table


SPECS: dict[str, Spec] = _collect()


def flag_of(name: str) -> str:
    """Return the command-line spelling of a field, for messages."""
    return SPECS[name].flag
