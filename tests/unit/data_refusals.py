"""What rules about batches and corpora refuse: (processes, settings, first flag, words)."""

from __future__ import annotations

DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 9}
SETS = {**DATA, "train_data_path": ["t"], "multiple_validation_sets": True}
RAMP = {"global_batch_size": 8, "train_samples": 80}
INTERLEAVED = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "overlap_p2p_communication": False,
}
FIM = {**DATA, "data_path": ["a"], "fim_data": True}
STEPS = {"step_batch_size_schedule": "0:4 640:8", "train_samples": 80}

DATA_REFUSED = [
    (2, {**RAMP, "rampup_batch_size": [2, 3, 16]}, "--rampup-batch-size", ["can be 5"]),
    (2, {**RAMP, "rampup_batch_size": [2, 4, 16]}, "--rampup-batch-size", ["do not lead up"]),
    (1, {**RAMP, "rampup_batch_size": [8, 2, 16]}, "--rampup-batch-size", ["do not lead up"]),
    (1, {**RAMP, "rampup_batch_size": [2, 2]}, "--rampup-batch-size", ["three positive"]),
    (1, {**RAMP, "rampup_batch_size": [2, 2, 2]}, "--rampup-batch-size", ["more sizes"]),
    (
        2,
        {**RAMP, "rampup_batch_size": [1, 1, 16]},
        "--rampup-batch-size",
        ["1 1 16 and 1 with 2 replicas", "be 1, 3, 5, 7", "--decrease-batch-size-if-needed"],
    ),
    (
        4,
        {**RAMP, "rampup_batch_size": [2, 2, 16], "decrease_batch_size_if_needed": True},
        "--rampup-batch-size",
        ["no sample left", "at least 4"],
    ),
    (
        1,
        {"global_batch_size": 8, "rampup_batch_size": [2, 2, 16]},
        "--rampup-batch-size",
        ["no measure", "Give --train-samples"],
    ),
    (1, {**STEPS, "global_batch_size": 8}, "--step-batch-size-schedule", ["Remove --global"]),
    (
        1,
        {**STEPS, "step_batch_size_schedule": "0:4 640;8"},
        "--step-batch-size-schedule",
        ["640;8 is not a number"],
    ),
    (
        1,
        {**STEPS, "step_batch_size_schedule": "64:4"},
        "--step-batch-size-schedule",
        ["at token 0"],
    ),
    (
        1,
        {**STEPS, "step_batch_size_schedule": "0:4 10:8"},
        "--step-batch-size-schedule",
        ["Two sizes begin at sample 0"],
    ),
    (3, {**STEPS, "train_samples": 81}, "--step-batch-size-schedule", ["be 4, 8"]),
    # The second stage of the ramp has three microbatches, which two ranks cannot take in turns.
    (
        2,
        {**RAMP, **INTERLEAVED, "rampup_batch_size": [2, 1, 16]},
        "--global-batch-size",
        ["3 microbatches in groups of 2"],
    ),
    (
        1,
        {**DATA, "data_path": ["a"], "train_data_path": ["b"]},
        "--data-path",
        ["--train-data-path", "named in one place"],
    ),
    (1, {**DATA, "train_data_path": ["b"], "mock_data": True}, "--mock-data", ["one source"]),
    (1, {**DATA, "train_data_path": ["b"], "split": "9,1"}, "--split", ["not divided"]),
    (1, {**DATA, "valid_data_path": ["b"]}, "--train-data-path", ["nothing to train on"]),
    (
        1,
        {**DATA, "train_data_path": ["b"], "eval_interval": 5},
        "--valid-data-path",
        ["nothing to evaluate on"],
    ),
    (
        1,
        {**DATA, "train_data_path": ["b"], "test_data_path": []},
        "--test-data-path",
        ["at least one corpus"],
    ),
    (
        1,
        {**DATA, "data_path": ["a"], "validation_set_names": ["v"]},
        "--validation-set-names",
        ["Add --multiple-validation-sets"],
    ),
    (
        1,
        {**DATA, "data_path": ["a"], "multiple_validation_sets": True},
        "--multiple-validation-sets",
        ["--valid-data-path"],
    ),
    (
        1,
        {**SETS, "valid_data_path": ["1", "a", "2", "b"]},
        "--multiple-validation-sets",
        ["Remove the weights"],
    ),
    (
        1,
        {**SETS, "valid_data_path": ["a", "b"], "validation_set_names": ["a"]},
        "--validation-set-names",
        ["a for 2 sets"],
    ),
    *(
        (1, {**DATA, "data_path": words.split()}, "--data-path", [f"got {words}", *says])
        for words, says in {
            "0.7 a 0.3": ["come in pairs", "3 words"],
            "1 a b": ["come in pairs"],
            "a 0.5 a 0.5": ["must be a weight"],
            "0 a 1 b": ["must be positive"],
            "nan a 1 b": ["must be positive"],
            "-1 a 2 b": ["must be positive"],
            "1e308 a 1e308 b": ["finite"],
        }.items()
    ),
    (
        1,
        {**DATA, "train_data_path": ["a"], "valid_data_path": ["1", "a", "b"]},
        "--valid-data-path",
        ["come in pairs"],
    ),
    (1, {"data_mix_change": "continue"}, "--data-mix-change", ["Add --load"]),
    (1, {"num_dataset_builder_threads": 0}, "--num-dataset-builder-threads", ["1 or more"]),
    (1, {"fim_rate": 0.3}, "--fim-rate", ["0.3 and nothing", "Add --fim-data"]),
    (1, {"fim_pad_token": "<p>"}, "--fim-pad-token", ["Add --fim-data"]),
    (1, {"fim_data": True, "mock_data": True}, "--fim-data", ["are numbers"]),
    (1, {"fim_data": True}, "--fim-data", ["are numbers"]),
    (1, {**FIM, "fim_rate": 1.5}, "--fim-rate", ["got 1.5", "0 to 1"]),
    (1, {**FIM, "fim_spm_rate": -0.5}, "--fim-spm-rate", ["0 to 1"]),
    (1, {**FIM, "fim_split_sample": "<file>"}, "--fim-split-sample", ["Give both"]),
    (1, {**FIM, "fim_fragment_rate": 0.0}, "--fim-split-sample", ["nothing and 0.0"]),
    (1, {**FIM, "fim_middle_token": "<fim_prefix>"}, "--fim-prefix-token", ["for both"]),
    (1, {**FIM, "fim_pad_token": "<fim_suffix>"}, "--fim-suffix-token", ["for both"]),
    (1, {**DATA, "data_args_path": "no/such"}, "--data-args-path", ["cannot be read"]),
    (1, {**DATA, "per_split_data_args_path": "no/such"}, "--per-split-data-args-path", ["read"]),
]
