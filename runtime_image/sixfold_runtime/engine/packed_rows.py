"""What trunks of all kinds do with a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sixfold_runtime.engine.packed_attention import PackedAttention
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.engine.token_groups import TokenGroups
from sixfold_runtime.engine.trunk import Rows


class Plan:
    """What the layers of a batch share: working memory, and which tokens compute with which task slice."""

    def __init__(self, qkv: torch.Tensor, attended: torch.Tensor, attention: PackedAttention) -> None:
        """
        Args:
            qkv: [tokens, (heads + 2 kv_heads) * head_dim], attended: [tokens, heads * head_dim], what the attention
                reads and fills.
        """
        self.qkv, self.attended, self.attention = qkv, attended, attention
        self._grouped: tuple[TaskSlice | None, ...] = ()
        self._groups: TokenGroups | None = None

    def groups(self, slices: Sequence[TaskSlice | None] | None) -> TokenGroups | None:
        """Of the tokens, by slice; None where no text has one."""
        wanted = () if slices is None else tuple(slices)
        if wanted != self._grouped:
            self._grouped, self._groups = wanted, None
            if any(part is not None for part in wanted):
                self._groups = TokenGroups(wanted, self.attention.lengths, self.qkv.device)
        return self._groups


def chosen(rows: Rows, keep: Sequence[int]) -> Rows:
    """The texts at these indices, packed again in this order, without a plan."""
    starts = rows.starts
    parts = [rows.hidden[starts[text] : starts[text] + rows.lengths[text]] for text in keep]
    return Rows(
        hidden=torch.cat(parts) if len(parts) > 1 else parts[0].clone(),
        lengths=tuple(rows.lengths[text] for text in keep),
        anchors=tuple(rows.anchors[text] for text in keep),
    )


def features(rows: Rows) -> torch.Tensor:
    """float32 [texts, 2 * width]: the anchors' hidden states beside the mean over each text."""
    hidden = rows.hidden.float()
    if len(rows.lengths) == 1:  # common where few requests come, and each operation tells there
        return torch.cat((hidden[rows.anchors[0]], hidden.mean(dim=0)))[None]
    lengths = torch.tensor(rows.lengths, device=hidden.device)
    texts = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    # Sums text by text: what is NaN in one must not reach another, as it would through a product.
    sums = hidden.new_zeros(len(lengths), hidden.shape[1]).index_add_(0, texts, hidden)
    return torch.cat((rows.anchored().float(), sums / lengths[:, None]), dim=1)
