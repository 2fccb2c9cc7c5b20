"""Settings of a run: section dataclasses, rules, command line and YAML. No torch in here."""

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.fp8 import Fp8Config
from megatron.config.fp8_guards import Fp8GuardsConfig
from megatron.config.fp8_stats import Fp8StatsConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoeConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.problems import ConfigError, Problem
from megatron.config.run import RuntimeConfig
from megatron.config.runconfig import RunConfig, finalize, make_config
from megatron.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "Fp8Config",
    "Fp8GuardsConfig",
    "Fp8StatsConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "ParallelConfig",
    "Problem",
    "RunConfig",
    "RuntimeConfig",
    "TrainingConfig",
    "finalize",
    "make_config",
]
