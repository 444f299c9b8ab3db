"""Every exception that routeprof raises on purpose.

    RouteprofError                     exit code 2
    ├── UsageError                     an argument that cannot be right
    │   └── InvalidTagError            a tag with control characters, a formula, or a reserved word
    ├── RecordingError                 something about a recording on disk
    │   ├── NotARecordingError         the path holds no recording
    │   ├── NewerSchemaError           written by a newer routeprof
    │   ├── EmptyRecordingError        a recording without a single readable part
    │   ├── RecordingExistsError       the directory to write to already holds something
    │   ├── NotWritableError           the directory to write to cannot be written
    │   ├── OverlapError               two directories hold the same part of one run
    │   ├── MismatchError              ranks or recordings of different models
    │   ├── OverflowingError           numbers too large to be counts
    │   ├── UnreachableError           the store or file system does not answer, or refuses
    │   ├── WorkersError               processes that were to read it are gone or cannot be reached
    │   └── LevelRequiredError         the question needs a more detailed level
    │       └── NotKnownError          the file that was converted does not say it
    ├── CaptureError                   attaching or recording went wrong
    │   ├── NoMoELayersError           the model has no MoE layer that could be measured
    │   ├── AlreadyAttachedError       these layers are being recorded already
    │   └── AttachError                a running process cannot be hooked
    └── MissingExtraError              an optional dependency is not installed

A message is one line that ends with what to do about it.
"""


class RouteprofError(Exception):
    """Base class: catch this to catch everything that routeprof raises on purpose."""

    exit_code = 2


class UsageError(RouteprofError):
    """An argument that cannot be right."""


class InvalidTagError(UsageError):
    """A tag with control characters, a leading formula character, or a reserved word."""


class RecordingError(RouteprofError):
    """Something about a recording on disk."""


class NotARecordingError(RecordingError):
    """The path holds no recording."""


class NewerSchemaError(RecordingError):
    """The recording was written by a newer routeprof."""


class EmptyRecordingError(RecordingError):
    """The recording has no readable part, so there is nothing to show."""


class RecordingExistsError(RecordingError):
    """The directory to write to already holds something."""


class NotWritableError(RecordingError):
    """The directory to write to cannot be made or written."""


class OverlapError(RecordingError):
    """Two directories hold the same rank of one run: added up, it would count twice."""


class MismatchError(RecordingError):
    """Ranks or recordings of different models, which cannot be added up."""


class OverflowingError(RecordingError):
    """Whole numbers add up to more than an int64 holds: the recording is damaged."""


class WorkersError(RecordingError):
    """The processes that were to read a recording are gone or cannot be reached."""


class UnreachableError(RecordingError):
    """The store or the file system that a recording is on cannot be read or listed."""


class LevelRequiredError(RecordingError):
    """The question can only be answered from a more detailed recording level."""


class NotKnownError(LevelRequiredError):
    """The question needs what the file that was converted does not say."""


class CaptureError(RouteprofError):
    """Attaching to a model or recording it went wrong."""


class NoMoELayersError(CaptureError):
    """The model has no MoE layer that could be measured."""


class AlreadyAttachedError(CaptureError):
    """These layers are being recorded already."""


class AttachError(CaptureError):
    """A running process cannot be hooked; the process goes on as before."""


class MissingExtraError(RouteprofError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; run: pip install 'routeprof[{extra}]'",
        )
