#!/usr/bin/env python3
"""scripts/deploy/ray_fuse.py on three Ray nodes of this machine, a worker of which is killed in the middle of its part.

    python -m venv ray && ray/bin/pip install 'ray==2.60.0' torch==2.13.0 -e . && ray/bin/python scripts/ray_check.py [SCALE]

Ray is no dependency of fusecheck, so this is run by hand. It makes a Qwen3-32B of 17 shards with all widths divided by SCALE
(default 16: 260 MB), fuses it by a local `fuse` and by the cluster, and compares; a checkpoint that lost a shard comes along,
and has to fail on its own. The cluster proves its result too: all bytes, and all layers' projections.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray  # type: ignore[import-not-found]
from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "deploy")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import ray_fuse  # type: ignore[import-not-found]  # noqa: E402

import fusecheck  # noqa: E402

PARTS = 6
VICTIM = 2
"""The part whose first worker dies."""


def dying(plan: str, part: int, parts: int) -> str:
    """As `run_part`; the first worker of one part is killed from outside once it has begun to write."""
    marks = Path(os.environ["RAY_CHECK_MARKS"])
    with (marks / f"part-{part}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if part == VICTIM and len((marks / f"part-{part}").read_text().split()) == 1:
        threading.Thread(target=_kill, args=(marks,), daemon=True).start()
    return str(ray_fuse.run_part(plan, part, parts))


def _kill(marks: Path) -> None:
    own = marks.parent / "out" / ".fusecheck"
    mine = f"/proc/{os.getpid()}/fd"
    while not any(".fusecheck/tmp-" in os.path.realpath(f"{mine}/{fd}") for fd in os.listdir(mine)):  # noqa: PTH208
        time.sleep(0.001)
    (marks / "killed").write_text(f"{os.getpid()}: {sorted(path.name for path in own.iterdir())}")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Make, fuse both ways, compare."""
    scale = sys.argv[1] if len(sys.argv) > 1 else "16"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        maker = ROOT / "scripts" / "make_checkpoint.py"
        subprocess.run([sys.executable, maker, "Qwen3-32B", place / "in", "--scale", scale], check=True)
        began = time.monotonic()
        fusecheck.fuse(place / "in", place / "reference")
        print(f"local fuse: {time.monotonic() - began:.1f} s")
        (place / "marks").mkdir()
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        os.environ["RAY_CHECK_MARKS"] = str(place / "marks")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, runtime_env={"env_vars": dict(os.environ)})
        print(f"{len(ray.nodes())} nodes")
        original, ray_fuse.run_part = ray_fuse.run_part, dying
        pairs = [ray_fuse.Pair.planned(str(place / "in"), str(place / "out"))]
        shutil.copytree(place / "in", place / "broken")
        pairs.append(ray_fuse.Pair.planned(str(place / "broken"), str(place / "not-made")))
        next((place / "broken").glob("*.safetensors")).unlink()
        try:
            began = time.monotonic()
            good, broken = ray_fuse.fuse_all(pairs, parts=PARTS, verify=True)
            print(f"{time.monotonic() - began:.1f} s\n{good.words}\nof the broken one: {broken.words}")
        finally:
            ray_fuse.run_part = original
            ray.shutdown()
            cluster.shutdown()
        print("killed:", (place / "marks" / "killed").read_text())
        print("attempts:", {p.name: len(p.read_text().split()) for p in sorted((place / "marks").glob("part-*"))})
        names = sorted(path.name for path in (place / "reference").iterdir())
        _, different, missing = filecmp.cmpfiles(place / "reference", place / "out", names, shallow=False)
        print(f"{len(names)} files, different: {different}, missing: {missing}")
        committed = (place / "not-made" / "fusecheck.json").exists()
        sys.exit(bool(different or missing or good.exit_code or not broken.exit_code or committed))


if __name__ == "__main__":
    main()
