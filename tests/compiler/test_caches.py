"""What a compile cache keys on, and what a process does that finds its graph there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torchseam
from torchseam import SeamConfig
from torchseam.compiler import fusion_pass
from torchseam.compiler.fusion_pass import FusionPass

TESTS = Path(__file__).parent.parent

#: Another value for every field of the configuration.
OTHERS = {
    "fuse_all_reduce": False,
    "fuse_norm_quant": False,
    "backend": "collective",
    "schemes": ("nvfp4",),
    "strict": True,
    "exact": True,
    "shard_residual": True,
}


def uuid(config: SeamConfig | None = None):
    return FusionPass(config or SeamConfig()).uuid()


# ---- the identity of the pass -------------------------------------------------------------------


def test_every_field_of_the_configuration_counts():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(SeamConfig)}
    ids = [uuid(), *(uuid(SeamConfig(**{name: other})) for name, other in OTHERS.items())]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", sorted(fusion_pass._environment()))
def test_everything_of_the_environment_counts(name, monkeypatch):
    before = uuid()
    real = fusion_pass._environment
    monkeypatch.setattr(fusion_pass, "_environment", lambda: {**real(), name: "another"})
    assert uuid() != before


def test_the_environment_is_what_this_process_has(one_rank, monkeypatch):
    assert fusion_pass._environment()["torch"] == torch.__version__
    assert fusion_pass._environment()["world_size"] == 1
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 3))
    environment = fusion_pass._environment()
    assert (environment["world_size"], environment["capability"]) == (7, (12, 3))


SOURCES = """
    import pathlib, torchseam
    from torchseam.compiler.fusion_pass import _source_hash
    root = pathlib.Path(torchseam.__file__).parent
    seen = {_source_hash.__wrapped__(): None}
    files = sorted(root.rglob("*.py"))
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before + b"# changed")
        seen[_source_hash.__wrapped__()] = None
        path.write_bytes(before)
    (root / "kernels" / "new.py").write_text("")
    seen[_source_hash.__wrapped__()] = None
    (root / "kernels" / "new.py").rename(root / "kernels" / "newer.py")
    seen[_source_hash.__wrapped__()] = None
    assert len(seen) == len(files) + 3, (len(seen), len(files))
    print(len(files))
"""


def test_any_file_of_the_package_counts_and_its_name_too(tmp_path):
    shutil.copytree(
        Path(torchseam.__file__).parent, tmp_path / "torchseam", ignore=shutil.ignore_patterns("__pycache__")
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SOURCES)], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_processes_have_the_same_identity():
    program = "from torchseam import SeamConfig; from torchseam.compiler.fusion_pass import FusionPass; "
    program += "print(FusionPass(SeamConfig()).uuid())"
    # Not this process: what other tests have imported (torchao) counts.
    ids = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ids.append(done.stdout.strip())
    assert len(ids[0]) == 64 and ids[0] == ids[1]


# ---- warm caches --------------------------------------------------------------------------------

WARM = """
    import json, sys
    sys.path.insert(0, {tests!r})
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://{store}" + sys.argv[1], rank=0, world_size=1)
    import torchseam
    from torch._dynamo.utils import counters
    from torchseam import Quant, SeamConfig
    from torchseam.compiler.fusion_pass import FusionPass
    from blocks import Block, GemmaNorm, same_bits
    calls = []
    original = FusionPass.__call__
    FusionPass.__call__ = lambda self, graph: (calls.append(1), original(self, graph))[1]
    torch.manual_seed(0)
    block = Block(GemmaNorm, "residual", Quant("fp8_token"), torch.bfloat16)
    forward = lambda x, y: block(x * 2, y * 2)  # so that both are overwritten
    args = torch.randn(5, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    with torch.no_grad():
        compiled = torchseam.compile(forward, config=SeamConfig(**json.loads(sys.argv[2])))
        same = all(same_bits(a, b) for _ in range(2) for a, b in zip(forward(*args), compiled(*args), strict=True))
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    print(json.dumps(dict(passes=len(calls), same=same, fused=torchseam.report(compiled).fused,
                          misses=inductor["fxgraph_cache_miss"],
                          hits=inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"])))
"""


def test_a_warm_cache_skips_compilation_and_still_runs_in_place(tmp_path):
    program = textwrap.dedent(WARM).format(tests=str(TESTS), store=tmp_path / "store")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(name: str, **config) -> dict:
        command = [sys.executable, "-c", program, name, json.dumps({"exact": True, **config})]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    cold, warm = run("1"), run("2")
    assert cold == {"passes": 1, "same": True, "fused": 1, "misses": 1, "hits": 0}
    assert warm["hits"] >= 1 and {**warm, "hits": 0} == {**cold, "passes": 0, "misses": 0}
    code = "".join(path.read_text() for path in (tmp_path / "cache").rglob("*.py"))
    assert "torch.ops.torchseam.seam_.x_residual_" in code, "or this test would not show what it is named for"
    other = run("3", backend="collective")
    assert (other["passes"], other["misses"], other["same"]) == (1, 1, True), "another configuration compiles anew"
