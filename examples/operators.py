"""The operators without the compiler: one call for a whole seam.

python examples/operators.py
"""

from __future__ import annotations

import torch

from torchseam import Norm, Quant, Seam, ops


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4096).bfloat16()
    residual = torch.randn(4, 4096).bfloat16()
    weight = torch.rand(4096)  # float32: a weight may have another dtype than the activations

    # residual add, RMSNorm, one FP8 scale for each row; the new residual is returned too.
    seam = Seam(norm=Norm(eps=1e-6), residual=True, quants=(Quant("fp8_token"),), outputs=("residual",))
    new_residual, codes, scales = ops.seam(seam, x, residual=residual, weight=weight)
    print(f"{seam.describe()}: residual {new_residual.dtype}, codes {codes.dtype}, scales {tuple(scales.shape)}")

    # The same row as NVFP4: two codes a byte, block scales in the 128x4 layout of Blackwell's GEMMs.
    factor = 448 * 6 / new_residual.float().abs().amax()
    seam = Seam(norm=Norm(eps=1e-6), residual=True, quants=(Quant("nvfp4"),))
    packed, block_scales = ops.seam(seam, x, residual=residual, weight=weight, scales=[factor])
    print(f"{seam.describe()}: codes {tuple(packed.shape)}, block scales {tuple(block_scales.shape)}")


if __name__ == "__main__":
    main()
