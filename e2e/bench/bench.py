"""`make bench B=<name>`: run a benchmark, print what it measured, and as the last line one JSON object.

Without B all of them run, with several names these, and together.py writes one table and one plot.

Each sibling module named in BENCHES has `run(quick: bool) -> dict`, with at least `ratio` (product over peer, more is
better) and `goal`. The exit code is 0 if it ran, whether or not the goal holds. QUICK=1 takes about a minute.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (HERE, HERE.parent, HERE.parent / "cluster")]
BENCHES = {
    "decode": "16 concurrent requests of mixed lengths: the engine over transformers, and over vLLM's CPU build",
    "levels": "a level change to every pod: poked kubelets over kubelets left to their own period (needs a cluster)",
    "sampler": "the NumPy sampler over transformers' logits processors, batch 8, top-p 0.9 with both penalties",
    "speculative": "drafting over plain decoding, assisted generation and generate(), where it pays and where not",
    "early_exit": "texts a second with early exit: over all layers, transformers' pipeline and ONNX Runtime",
    "subgraphs": "task slices on demand: bytes over all of them in memory, and a cold task's first request",
    "batching": "batches by length over fixed batches of 8 and a first-come token-budget queue, one heavy-tailed load",
    "kv_reuse": "time to first token with keys and values from Redis over computing them, and what 8 and 4 bits cost",
    "streaming": "plain events over zstd, gzip and sse-zstd: bytes, CPU a token, and when clients can read each event",
    "operator": "500 policies on a kwok cluster: a bare loop that applies the same over it; writes, requests, memory",
    "quantised": "decoding at width 2,048: INT4 and INT8 over full precision, for 1 and 8 rows",
}


def main() -> int:
    names = sys.argv[1:] or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"usage: make bench [B=<name>]; there is no {unknown[0]!r}", file=sys.stderr)
        for known, what in BENCHES.items():
            print(f"  {known:<11} {what}", file=sys.stderr)
        return 2
    if len(names) > 1:
        return importlib.import_module("together").run(names, keep=len(sys.argv) == 1)
    quick = bool(os.environ.get("QUICK"))
    result = importlib.import_module(f"bench_{names[0]}").run(quick=quick)
    print(json.dumps({"name": names[0], "quick": quick, **result, "holds": result["ratio"] >= result["goal"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
