"""Progress for a person: what is being done, and how long it took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class HarnessError(Exception):
    """What went wrong and what to do about it, in words for the person at the terminal."""


def say(text: str) -> None:
    """Print one line of progress; standard output stays free for results that scripts read."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce `what`, and print the seconds that it took."""
    say(f"  ... {what}")
    start = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"  !!! {what}: failed after {time.monotonic() - start:.1f} s")
        raise
    say(f"  ok  {what} ({time.monotonic() - start:.1f} s)")
