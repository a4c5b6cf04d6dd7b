"""vLLM's side of a benchmark, run by the Python of its own virtual environment: one JSON workload a line on standard
input, one JSON result a line on standard output.

Usage: vllm_peer.py <model folder> <dtype> <max sequences> <context tokens>
A workload is a list of [prompt token ids, tokens to generate]; a result is [seconds, generated tokens].
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no result
    # In one process with one thread, as its opponent.
    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING",
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    folder, dtype, max_sequences, context_tokens = sys.argv[1:]
    llm = LLM(
        model=folder,
        dtype=dtype,
        max_num_seqs=int(max_sequences),
        max_model_len=int(context_tokens),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        settings = [SamplingParams(temperature=0, max_tokens=tokens) for _, tokens in work]
        prompts = [{"prompt_token_ids": ids} for ids, _ in work]
        started = time.perf_counter()
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps([seconds, made]), file=answers, flush=True)


if __name__ == "__main__":
    main()
