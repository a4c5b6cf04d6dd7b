"""`make gpu-check`: the CUDA paths of generation, quantisation and the sampler pipeline, and a short bench, on a GPU.

The last line is one JSON object. Exits 0 if every test passed, 1 if one failed, 2 where there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
MODELS = REPOSITORY / "examples" / "models"
SUITES = (
    "tests/runtime/engine/test_cuda.py",
    "tests/runtime/engine/test_forward.py",
    "tests/runtime/engine/test_kv_reuse.py",
    "tests/runtime/engine/test_packed_attention.py",
    "tests/runtime/engine/test_quantized.py",
    "tests/runtime/kv/test_kv_cuda.py",
    "tests/unit/test_engine_pipeline.py",
)
TEST_SECONDS = 360
REQUESTS, TOKENS = 16, 96
NO_DEVICE = 2


def main() -> int:
    import torch

    started = time.monotonic()
    if not torch.cuda.is_available():
        reason = "no CUDA device is visible to torch: run this on a machine with a GPU and its driver"
        print(json.dumps({"name": "gpu-check", "ran": False, "reason": reason}))
        return NO_DEVICE
    tests = run_tests()
    result = {
        "name": "gpu-check",
        "ran": True,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": tests,
        "tokens_per_second": bench(),
        "seconds": round(time.monotonic() - started, 1),
        "holds": not tests["failed"] and tests["passed"] > 0,
    }
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def run_tests() -> dict[str, int]:
    """How the tests with `cuda` in their name or file, and those that take any device, ended."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", *SUITES, "-k", "cuda", f"--junitxml={report.name}"]
        # Prompts and weights are the same in every run, and so are the figures.
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "CI": "true"}, timeout=TEST_SECONDS, check=False)
        suite = ElementTree.parse(report.name).getroot().find("testsuite")
    assert suite is not None, "pytest wrote no report: its output above says why"
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def bench() -> dict[str, float]:
    """Greedy tokens a second of the example model, alone and 16 at once, plain and drafted, by the SDK."""
    from concurrent.futures import ThreadPoolExecutor

    from sixfold_runtime.sdk import InferenceEngine

    figures = {}
    prompt = "KING:\nWhat news from the court, and who brought it?\n\n"
    with InferenceEngine(MODELS / "chat", draft=MODELS / "chat-draft", device="cuda", num_tokens=8) as engine:
        for name, ask in (("plain", engine.generate), ("speculative", engine.speculate)):
            for batch in (1, REQUESTS):
                with ThreadPoolExecutor(batch) as clients:
                    for _ in range(2):  # the first run warms kernels and estimates up
                        began = time.monotonic()
                        jobs = [clients.submit(ask, prompt, max_tokens=TOKENS, temperature=0) for _ in range(batch)]
                        made = sum(job.result().completion_tokens for job in jobs)
                        figures[f"{name}_batch_{batch}"] = round(made / (time.monotonic() - began), 1)
    return figures


if __name__ == "__main__":
    sys.exit(main())
