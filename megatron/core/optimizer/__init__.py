"""Optimizer with fp32 masters, gradient clipping, loss scaling and schedules."""

from megatron.core.optimizer.build import build_optimizer, build_scheduler
from megatron.core.optimizer.mixed import MixedPrecisionOptimizer, StepResult

__all__ = ["MixedPrecisionOptimizer", "StepResult", "build_optimizer", "build_scheduler"]
