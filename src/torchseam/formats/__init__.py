"""Number formats and their memory layouts: bytes, shapes, strides, scales. Pure torch, no torchseam above."""

from . import fp8, layout, nvfp4

__all__ = ["fp8", "layout", "nvfp4"]
