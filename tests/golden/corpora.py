"""Corpora and sample orders recorded from Megatron-LM; a port must reproduce them bit by bit."""

from __future__ import annotations

# Eight documents of these lengths, tokens 0..35 consecutively, stored as uint16.
LENGTHS = (5, 3, 7, 2, 6, 4, 1, 8)
IDX_SHA256 = "3053e0f75f793e32af53afc4bcc472a7f403c8a4622dc4c8b51c9a4dbfea05d0"
BIN_SHA256 = "a66e1e79d181ee5cb0942167b5532288c1cad68c9d318b7b4f0e351230c12e59"
IDX_START = bytes.fromhex(
    "4d4d49444944580000" "0100000000000000" "08" "0800000000000000" "0900000000000000"
    "05000000" "03000000"
)  # fmt: skip

# GPTDataset over that corpus, seed 1234, sequence length 4, split 100,0,0; keyed by the number of
# samples asked for.
SEED, SEQUENCE_LENGTH = 1234, 4
ORDERS: dict[int, dict[str, object]] = {
    8: {
        "epochs": 1,
        "separate": False,
        "document_index": [2, 1, 6, 0, 4, 5, 3, 7],
        "sample_index": [
            [0, 0], [0, 4], [1, 1], [3, 1], [4, 0], [4, 4], [5, 2], [7, 0], [7, 4],
        ],
        "shuffle_index": [5, 0, 3, 4, 2, 6, 1, 7],
        "tokens0": [21, 22, 23, 24],
    },
    10: {
        "epochs": 2,
        "separate": True,
        "document_index": [2, 1, 6, 0, 4, 5, 3, 7, 5, 0, 3, 4, 2, 6, 1, 7],
        "shuffle_index": [5, 1, 3, 7, 0, 6, 2, 4, 13, 15, 12, 11, 16, 10, 14, 9, 8],
    },
    20: {
        "epochs": 3,
        "separate": True,
        "document_index": [
            5, 3, 0, 4, 6, 2, 2, 7, 1, 1, 0, 4, 5, 6, 3, 7, 5, 1, 3, 4, 0, 7, 6, 2,
        ],
        "shuffle_index": [
            7, 10, 4, 1, 12, 8, 3, 15, 14, 13, 5, 11, 0, 2, 6, 9, 16, 17, 22, 25, 23, 24, 18,
            21, 20, 19,
        ],
        "tokens0": [11, 12, 13, 14],
        "labels0": [12, 13, 14, 28],
    },
}  # fmt: skip

BLEND_WEIGHTS = (0.5, 0.3, 0.2)
BLEND_DATASETS = [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
BLEND_SAMPLES = [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]

# Lengths of the built-in pseudo corpus of `--mock-data`.
MOCK_FIRST_LENGTHS = [3484, 2609, 2094, 1105, 1261, 168, 309, 68]
MOCK_TOTAL = 204637097
