"""What the one-shot kernel takes, a model and rows. Written by benchmarks/fit_model.py, not by hand.

2 x NVIDIA H200, residual + norm + static FP8 in bf16 (benchmarks/results/collective-2xh200.csv). The
model is at most 12.3% from a row. What it says of other GPUs, of more ranks and of two-shot was not measured.
"""

#: Where the rows were measured.
GPU = "NVIDIA H200"
CAPABILITY = (9, 0)
WORLD_SIZE = 2
#: us of a call that pushes next to nothing.
ALPHA = 3.866
#: Bytes that a rank pushes in a us.
BETA = 331790
#: us from a push to the end of the wait for it: ALPHA less the time of the local kernel for one short row.
HOP = 2.286
#: (bytes of a row, T) -> us.
MEASURED = {
    (8192, 1): 3.47,
    (8192, 2): 3.88,
    (8192, 4): 3.83,
    (8192, 8): 4.19,
    (8192, 16): 4.16,
    (8192, 32): 4.22,
    (8192, 64): 5.11,
    (8192, 128): 7.08,
    (8192, 256): 10.5,
    (8192, 512): 16.14,
    (8192, 1024): 28.74,
    (8192, 4096): 98.71,
    (16384, 1): 3.71,
    (16384, 2): 4.42,
    (16384, 4): 4.06,
    (16384, 8): 4.53,
    (16384, 16): 5.31,
    (16384, 32): 5.83,
    (16384, 64): 7.93,
    (16384, 128): 11.09,
    (16384, 256): 17.33,
    (16384, 512): 30.75,
    (16384, 1024): 52.63,
    (16384, 4096): 194.42,
}
