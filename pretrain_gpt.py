"""Pretrain a GPT model: ``torchrun --nproc-per-node N pretrain_gpt.py [flags]``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from megatron.config import ConfigError
from megatron.config.cli import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, start, train.

    Returns:
        0 when the run is done or left early on request, 1 when it failed, 2 for a configuration
        that cannot work.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(tokens):
        parse(tokens)  # prints and leaves, before torch is imported
    from megatron.core import parallel_state
    from megatron.core.errors import MegatronError
    from megatron.training.initialize import read_launch, start
    from megatron.training.providers import saved_config
    from megatron.training.trainer import Trainer

    label, runtime, trainer = "", None, None
    try:
        launch = read_launch()
        label = f"rank {launch.rank}"
        config, notices = parse(tokens, launch.world_size, saved_config)
        runtime = start(config, launch)
        label = runtime.mesh.label()
        parallel_state.install(runtime.mesh)
        trainer = Trainer(runtime, notices)
        code = trainer.run()
        runtime.close()
        return code
    except ConfigError as error:
        if label in ("rank 0", ""):
            print(error, file=sys.stderr, flush=True)
        return 2
    except MegatronError as error:
        print(f"[{trainer.where() if trainer else label}] {error}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:
        # One write, so that the ranks' texts do not mix; the last line says who, where and what.
        text = traceback.format_exc()
        text += f"[{trainer.where() if trainer else label}] {type(error).__name__}: {error}\n"
        sys.stderr.write(text)
        return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        # A failed rank must not wait for the others in some library's clean-up: it leaves at once,
        # and the launcher ends the rest.
        os._exit(exit_code)
