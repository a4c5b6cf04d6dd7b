"""Runs in ONNX Runtime's own virtual environment: exports a classifier, then labels what it is sent, line by line.

    python onnx_peer.py FOLDER THREADS

A line {"texts": [...], "batch": n} is answered with "labels", "seconds" and "cpu_seconds". Texts are tokenised, sorted
by length and padded to the longest of their batch; all of it counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def export(model: Any, path: Path) -> None:
    ids = torch.randint(5, 1000, (3, 17))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    sizes = {0: torch.export.Dim("texts", min=1, max=1024), 1: torch.export.Dim("tokens", min=2, max=512)}
    torch.onnx.export(
        Logits(model), (ids, mask), str(path),
        input_names=["input_ids", "attention_mask"], output_names=["logits"],
        dynamic_shapes=(sizes, sizes), dynamo=True, verbose=False,
    )  # fmt: skip


def open_session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def label(session: Any, tokenizer: Any, names: dict[int, str], texts: list[str], batch: int) -> list[str]:
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    labels = [""] * len(ids)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        padded = np.zeros((len(chosen), max(len(ids[index]) for index in chosen)), dtype=np.int64)
        mask = np.zeros_like(padded)
        for row, index in enumerate(chosen):
            padded[row, : len(ids[index])], mask[row, : len(ids[index])] = ids[index], 1
        logits = session.run(None, {"input_ids": padded, "attention_mask": mask})[0]
        for index, best in zip(chosen, logits.argmax(-1), strict=True):
            labels[index] = names[int(best)]
    return labels


def main() -> None:
    warnings.simplefilter("ignore")
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # the exporter prints
    torch.set_num_threads(threads)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with tempfile.TemporaryDirectory() as place:
        export(model, Path(place) / "model.onnx")
        session = open_session(Path(place) / "model.onnx", threads)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    names = model.config.id2label
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        labels = label(session, tokenizer, names, work["texts"], work["batch"])
        took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps({"labels": labels, **took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
