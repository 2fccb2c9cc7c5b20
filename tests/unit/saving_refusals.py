"""What rules about saving refuse: (processes, settings, first flag, words of the message)."""

from __future__ import annotations

SAVE = {"save": "x", "save_interval": 10}
OFTEN = {**SAVE, "non_persistent_save_interval": 2}

SAVING_REFUSED = [
    (1, {"async_save": True}, "--async-save", ["Nothing is saved", "Add --save"]),
    (1, {**SAVE, "keep_last": 0}, "--keep-last", ["got 0", "at least 1"]),
    (1, {**SAVE, "keep_every": 25}, "--keep-every", ["25 and 10", "multiple of 10"]),
    (1, OFTEN, "--non-persistent-ckpt-type", ["nothing and 2", "global or local"]),
    (
        1,
        {**OFTEN, "non_persistent_ckpt_type": "local"},
        "--non-persistent-local-ckpt-dir",
        ["folder of its own"],
    ),
    (
        1,
        {**OFTEN, "non_persistent_ckpt_type": "global", "non_persistent_local_ckpt_dir": "x"},
        "--non-persistent-local-ckpt-dir",
        ["x and global"],
    ),
    (
        1,
        {"exit_signal_handler": True, "exit_signal_deadline": 0.0},
        "--exit-signal-deadline",
        ["no time"],
    ),
    (1, {"exit_signal_deadline": 60.0}, "--exit-signal-deadline", ["Add --exit-signal-handler"]),
    (1, {"exit_signal": "SIGUSR2"}, "--exit-signal", ["SIGUSR2 and no handler"]),
    (1, {**SAVE, "save": "c/iter_0000010/"}, "--save", ["of one checkpoint", "Give c, or"]),
    (1, {**SAVE, "save": "s3:///run"}, "--save", ["got s3:///run", "like s3://bucket/run"]),
    (1, {"load": "simplecache::s3://bucket/run"}, "--load", ["one protocol"]),
    (1, {"load": "s3://bucket/run*"}, "--load", ["without * ?"]),
    (
        1,
        {**OFTEN, "save": "s3://bucket/run", "non_persistent_ckpt_type": "global"},
        "--non-persistent-global-ckpt-dir",
        ["nothing and s3://bucket/run", "on a shared disk"],
    ),
    (
        1,
        {**OFTEN, "non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "s3://b/x"},
        "--non-persistent-local-ckpt-dir",
        ["paths of the file system"],
    ),
]
SAVING_ACCEPTED = [
    {**SAVE, "async_save": True, "keep_last": 2, "keep_every": 100, "verify_checkpoint": True},
    {**OFTEN, "non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "y"},
    {"save": "s3://bucket/run", "save_interval": 10, "load": "gs://bucket/run", "keep_last": 2},
    {"save": "file:///x", "save_interval": 10, "load": "hdfs://host:9000/run/iter_0000010"},
    {"exit_signal_handler": True, "exit_signal": "12", "exit_signal_deadline": 60.0},
]
