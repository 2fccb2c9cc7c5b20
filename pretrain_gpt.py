"""Pretrain a GPT model: ``torchrun --nproc-per-node N pretrain_gpt.py [flags]``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from megatron.config.cli import parse
from megatron.config.corpus_files import corpora_exist
from megatron.config.tool_flags import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, start, train.

    Returns:
        0 when the run is done or left early on request, 1 when it failed, 2 for a configuration
        that cannot work, 130 after Ctrl-C.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(tokens):
        parse(tokens)  # prints and leaves, before torch is imported
    from megatron.core import parallel_state
    from megatron.training.checkpointing import with_checkpoint_args
    from megatron.training.dry_run import dry_run
    from megatron.training.failures import Report
    from megatron.training.initialize import Launch, read_launch, start
    from megatron.training.providers import saved_config
    from megatron.training.trainer import Trainer

    with Report(Launch()) as report:
        report.launch = launch = read_launch()
        # What --print-config asks for is printed once.
        with contextlib.redirect_stdout(sys.stdout if launch.rank == 0 else io.StringIO()):
            config, notices = parse(tokens, launch.world_size, saved_config, [corpora_exist])
        config = with_checkpoint_args(config)
        if config.dry_run:
            report.launch = Launch()  # the first rank works alone: no other has its problem to tell
            if launch.rank == 0:
                dry_run(config, notices, print)
            return report.exit_code
        runtime = start(config, launch)
        report.follow(runtime)
        parallel_state.install(runtime.mesh)
        trainer = Trainer(runtime, notices)
        report.where = trainer.where
        trainer.run()
        report.leave()
        runtime.close()
    return report.exit_code


if __name__ == "__main__":
    code = exit_code_of(main)
    if code:
        # A failed rank does not wait in some library's clean-up for the others: it leaves at once,
        # its connections break, and the launcher ends the rest.
        os._exit(code)
