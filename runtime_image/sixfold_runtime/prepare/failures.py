"""Why a preparation can't succeed: one word for the condition, one sentence for the person."""

from __future__ import annotations

from enum import StrEnum

from sixfold_api.variant import PreparationFailure

_MAX_MESSAGE_CHARACTERS = 1024


class Reason(StrEnum):
    """Reasons of the condition Prepared."""

    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_UNREACHABLE = "SourceUnreachable"
    UNAUTHORIZED = "Unauthorized"
    UNSAFE_PATH = "UnsafePath"
    UNSAFE_FORMAT = "UnsafeFormat"
    UNSUPPORTED_FORMAT = "UnsupportedFormat"
    DISK_FULL = "DiskFull"
    CLAIM_NOT_WRITABLE = "ClaimNotWritable"
    READ_FAILED = "ReadFailed"
    INVALID_CONFIG = "InvalidConfig"
    WRONG_ARCHITECTURE = "WrongArchitecture"
    MISSING_WEIGHTS = "MissingWeights"
    CORRUPT_WEIGHTS = "CorruptWeights"
    NON_FINITE_WEIGHTS = "NonFiniteWeights"
    TOKENIZER_MISMATCH = "TokenizerMismatch"
    LABEL_MISMATCH = "LabelMismatch"
    UNSUPPORTED_PRECISION = "UnsupportedPrecision"
    UNUSABLE_CALIBRATION = "UnusableCalibration"
    UNUSABLE_EVALUATION = "UnusableEvaluation"
    OVER_BUDGET = "OverBudget"
    UNUSABLE_ADAPTER = "UnusableAdapter"
    ADAPTER_NOT_RETRAINED = "AdapterNotRetrained"
    UNUSABLE_SLICE = "UnusableSlice"
    UNUSABLE_TRAINING = "UnusableTraining"
    UNUSABLE_EXITS = "UnusableExits"
    INVALID_DEPTHS = "InvalidDepths"
    UNEXPECTED = "Unexpected"


_TRANSIENT = {Reason.SOURCE_UNREACHABLE, Reason.DISK_FULL, Reason.READ_FAILED, Reason.UNEXPECTED}


class PreparationError(Exception):
    """The preparation failed for a reason that a person can act on.

    Args:
        reason: one word for machines.
        message: what was wrong, in which file, and what to do.
        transient: whether another try may succeed; by default the reason says.
    """

    def __init__(self, reason: Reason, message: str, *, transient: bool | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.transient = reason in _TRANSIENT if transient is None else transient

    def failure(self) -> PreparationFailure:
        """The failure as the Job reports it; a message that is too long loses its end."""
        text = " ".join(str(self).split())
        if len(text) > _MAX_MESSAGE_CHARACTERS:
            text = text[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
        return PreparationFailure(reason=self.reason.value, message=text)
