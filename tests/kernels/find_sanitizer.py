"""Where NVIDIA's compute-sanitizer is on this machine."""

from __future__ import annotations

import glob
import os
import shutil
import sysconfig

WHERE = (
    "compute-sanitizer: $COMPUTE_SANITIZER, or on the PATH, in /usr/local/cuda*, or from the package "
    "nvidia-cuda-sanitizer-api"
)


def find_sanitizer() -> str | None:
    packages = sysconfig.get_paths()["purelib"]
    found = [
        os.environ.get("COMPUTE_SANITIZER"),
        shutil.which("compute-sanitizer"),
        *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True),
        *sorted(glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer"), reverse=True),
        *sorted(glob.glob(f"{packages}/nvidia/*/bin/compute-sanitizer"), reverse=True),
    ]
    return next((path for path in found if path and os.access(path, os.X_OK)), None)
