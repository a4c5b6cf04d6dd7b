"""Quantise a model folder with GPTQModel in several ways: python make_gptq_checkpoints.py SOURCE TARGET.

A process of its own: importing GPTQModel takes 20 seconds and changes the process's environment. Beside each
checkpoint lie the logits that GPTQModel itself computes from it (logits.safetensors: token_ids, logits).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # it crashes on two cores without
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than the models do

import torch
from safetensors.torch import save_file

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "layered": {
        "bits": 4,
        "group_size": 64,
        "desc_act": True,
        "sym": False,
        "dynamic": {
            r"+:.*\.o_proj$": {"bits": 8},
            r"+:.*\.gate_proj$": {"bits": 8, "group_size": 32},
            r"+:.*\.v_proj$": {"bits": 3},
            r"+:.*\.down_proj$": {"bits": 2},
            r"-:.*\.up_proj$": {},
        },
    },
    "row": {"bits": 4, "group_size": -1, "desc_act": True, "sym": False, "format": "gptq_v2", "act_group_aware": False},
}


def main(source: Path, target: Path) -> None:
    torch.set_num_threads(1)
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    torch.manual_seed(5)
    token_ids = torch.randint(2, 300, (1, 48))
    # Each token is drawn around its predecessor, so that input channels differ in what they carry.
    calibration = [(torch.randn(64).mul(20).cumsum(0).abs() % 300).long().tolist() for _ in range(32)]
    for name, settings in CHECKPOINTS.items():
        model = GPTQModel.load(str(source), QuantizeConfig(**settings), device="cpu")
        model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration], batch_size=4)
        model.save(str(target / name))
        reloaded = GPTQModel.load(str(target / name), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.bfloat16)
        with torch.inference_mode():
            logits = reloaded.model(input_ids=token_ids).logits[0].float()
        save_file({"token_ids": token_ids, "logits": logits}, target / name / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
