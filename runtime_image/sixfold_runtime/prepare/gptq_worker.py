"""GPTQ by GPTQModel, in a process of its own: it changes transformers while it is imported, and logs as it likes.

    python -m sixfold_runtime.prepare.gptq_worker REQUEST.json

The request says `source` and `target` folders, `device`, `config` (of QuantizeConfig), `calibration` (token ids) and
`result`, the file for the loss of each linear. It runs in a scratch folder, which gets a folder `logs`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_BATCH_TOKENS = 4096


def main(request: dict[str, Any]) -> None:
    # It hangs with one worker, and it takes one where there are two cores.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-untyped]

    config = QuantizeConfig(**request["config"], offload_to_disk=False)
    model = GPTQModel.load(request["source"], config, device=request["device"], trust_remote_code=False)
    longest = max(len(ids) for ids in request["calibration"])
    logged = model.quantize(
        [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in request["calibration"]],
        batch_size=max(1, _BATCH_TOKENS // longest),
        calibration_data_min_length=1,
    )
    model.save(request["target"])
    rows = [row for rows in logged.values() for row in rows] if isinstance(logged, dict) else logged
    Path(request["result"]).write_text(json.dumps([{key: str(row[key]) for key in row} for row in rows]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
