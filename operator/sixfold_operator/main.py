"""`python -m sixfold_operator.main`: registers the handlers and runs them."""

from __future__ import annotations

import sys

from pydantic import ValidationError

from sixfold_operator.handlers import process, watches
from sixfold_operator.logs import setup_logging
from sixfold_operator.settings import OperatorSettings

__all__ = ["process", "watches"]


def main() -> int:
    try:
        settings = OperatorSettings()
    except ValidationError as error:
        print(f"The environment variables SIXFOLD_* are not right: {error}", file=sys.stderr)
        return 2
    setup_logging(settings.log_level)
    process.run(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
