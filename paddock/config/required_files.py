"""Files that settings name, so that a dry run can say which are missing."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredFile:
    """A file or folder that is read, and what it must contain."""

    path: str
    contains: str

    @property
    def is_missing(self) -> bool:
        return not Path(self.path).expanduser().exists()
