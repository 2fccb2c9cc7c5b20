"""The finished configuration of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.batch_size import BatchSchedule, BatchSizeConfig, replicas_step, schedule_of
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.data_mix import DataMixConfig
from megatron.config.draft import Draft, derive
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
from megatron.config.problems import ConfigError, Rule
from megatron.config.rules import check
from megatron.config.run import RuntimeConfig
from megatron.config.schema import SECTIONS, SPECS
from megatron.config.training import TrainingConfig
from megatron.config.values import yaml_value


@dataclass(frozen=True)
class RunConfig:
    """Everything a run was told and everything that follows from it; immutable.

    Every field of every section is also readable here: ``cfg.num_layers`` is
    ``cfg.model.num_layers``. Build one with :func:`make_config`, from the command line with
    ``megatron.config.cli.parse``, or from another one with :meth:`replace`.

    Attributes:
        given: What the user set; the rest are defaults and derived values.
        notices: Lines the user should see once.
    """

    model: ModelConfig
    moe: MoeConfig
    fp8: Fp8Config
    fp8_attention: Fp8AttentionConfig
    fp8_guards: Fp8GuardsConfig
    fp8_stats: Fp8StatsConfig
    parallel: ParallelConfig
    fp8_dp: Fp8ReplicasConfig
    training: TrainingConfig
    batch_size: BatchSizeConfig
    data: DataConfig
    data_mix: DataMixConfig
    fim: FimConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    run: RuntimeConfig
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        """Return a section's field by its own name."""
        spec = SPECS.get(name)
        if spec is None or spec.section not in self.__dict__:
            raise AttributeError(f"there is no setting named {name}")
        return getattr(self.__dict__[spec.section], name)

    def __hash__(self) -> int:
        """Hash what ``==`` compares."""
        return hash(tuple(getattr(self, section) for section in SECTIONS))

    def replace(self, **fields: Any) -> RunConfig:
        """Return this configuration with some settings changed and everything else derived anew.

        Args:
            **fields: New values; ``None`` puts a setting back to its derived default.
                ``world_size`` may be among them.

        Returns:
            A finalized configuration.

        Raises:
            ConfigError: The result cannot work.
        """
        world_size = fields.pop("world_size", self.parallel.world_size)
        merged = {**self.given, **fields}
        return finalize({k: v for k, v in merged.items() if v is not None}, world_size)

    def batches(self) -> BatchSchedule:
        """Return the plan of the global batch, which has one size unless it was said otherwise."""
        return schedule_of(self)

    def with_batch(self, size: int) -> RunConfig:
        """Return this configuration for one stage of the plan of batch sizes.

        Args:
            size: Global batch; a multiple of what all replicas read at once.
        """
        count = size // replicas_step(self)
        stage = dataclasses.replace(self.training, global_batch_size=size, num_microbatches=count)
        return dataclasses.replace(self, training=stage)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value (tuples become lists), derived ones included."""
        flat = {name: getattr(self, name) for name in SPECS}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}

    def given_dict(self) -> dict[str, Any]:
        """Return the settings the user made, as plain values; enough to rebuild this object."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self.given.items()}

    def to_yaml(self, origins: Mapping[str, str] | None = None) -> str:
        """Return YAML that reproduces this configuration at the same number of processes.

        Args:
            origins: Where each setting came from; added as comments.

        Returns:
            What was given as settings, everything else as comments.
        """
        lines = ["# Settings that were given. Use as: --config FILE"]
        for name, value in self.given.items():
            origin = (origins or {}).get(name)
            lines.append(f"{name}: {yaml_value(value)}" + (f"  # {origin}" if origin else ""))
        lines.append(f"# Defaults and what follows, with {self.world_size} process(es):")
        rest = (name for name in SPECS if name not in self.given)
        lines.extend(f"# {name}: {yaml_value(getattr(self, name))}" for name in rest)
        return "\n".join(lines) + "\n"


def finalize(
    fields: Mapping[str, Any],
    world_size: int = 1,
    *,
    origins: Mapping[str, str] | None = None,
    more: Sequence[Rule] = (),
) -> RunConfig:
    """Check settings, derive what was left open and freeze the result.

    Args:
        fields: Settings by field name; a missing one takes its default.
        world_size: Number of processes of the run.
        origins: Where each setting came from, for messages.
        more: Rules about what is outside the configuration.

    Returns:
        The finished configuration.

    Raises:
        ConfigError: Lists every problem, not only the first.
    """
    draft = Draft(fields, world_size, origins)
    derive(draft)
    problems = [*draft.problems, *check(draft, more)]
    if problems:
        raise ConfigError(problems)
    sections = {
        section: section_class(
            **{n: draft.values[n] for n, spec in SPECS.items() if spec.section == section}
        )
        for section, section_class in SECTIONS.items()
    }
    return RunConfig(**sections, given=dict(draft.given), notices=tuple(draft.notices))


def make_config(world_size: int = 1, **fields: Any) -> RunConfig:
    """Build a finished configuration in Python.

    Args:
        world_size: Number of processes of the run.
        **fields: Settings by field name.

    Returns:
        The finished configuration.

    Raises:
        ConfigError: Lists every problem, not only the first.
    """
    return finalize(fields, world_size)
