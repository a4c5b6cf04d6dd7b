"""Progress of long steps, with elapsed time and ETA: a live bar in a terminal, a line every twenty seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

CONSOLE = Console(stderr=True)
LOG_INTERVAL_SECONDS = 20.0


class Stage:
    """Steps of one stage. Iterate over it; set ``note`` to what the last step measured."""

    def __init__(self, title: str, steps: int) -> None:
        self.title = title
        self.steps = steps
        self.note = ""

    def __iter__(self) -> Iterator[int]:
        return self._bar() if CONSOLE.is_terminal else self._lines()

    def _bar(self) -> Iterator[int]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=CONSOLE) as bar:
            task = bar.add_task(self.title, total=self.steps)
            for step in range(self.steps):
                yield step
                bar.update(task, advance=1, description=f"{self.title} {self.note}")

    def _lines(self) -> Iterator[int]:
        start = last = time.monotonic()
        for step in range(self.steps):
            yield step
            now = time.monotonic()
            done = step + 1
            if now - last >= LOG_INTERVAL_SECONDS or done == self.steps:
                elapsed_seconds = now - start
                eta_seconds = elapsed_seconds / done * (self.steps - done)
                CONSOLE.print(
                    f"{self.title}: {done}/{self.steps} {self.note} "
                    f"elapsed {elapsed_seconds:.0f} s, ETA {eta_seconds:.0f} s",
                    highlight=False,
                    soft_wrap=True,
                )
                last = now
