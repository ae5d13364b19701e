"""Everything that fusecheck raises on purpose, and the exit code that goes with it.

FusecheckError                     70  a bug, when raised bare
├── UsageError                      2  the command line asks for what cannot be
├── CheckpointError                 3  the checkpoint is malformed or unsupported; a retry cannot help
└── SystemFailure                   4  space, permission, I/O, network, a source that changed; a retry may help
Interrupted                  128 + n  a signal asked us to stop
"""

from __future__ import annotations

import signal
import unicodedata

SHOWN_LENGTH = 160
"""Characters of one foreign name that a message shows before it is cut in the middle."""

_IGNORABLE = frozenset(
    [
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164, 0xFFA0),
        *range(0xFE00, 0xFE10),
        *range(0xE0100, 0xE01F0),
    ]
)
"""Code points that draw nothing although their category is a letter, mark or symbol (Unicode's Default_Ignorable)."""


def invisible(character: str) -> bool:
    """Whether a character can hide, forge or reorder text: control, format, bidi, separator, surrogate, ignorable."""
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} or ord(character) in _IGNORABLE


def printable(text: str) -> str:
    """Foreign text with every invisible character spelled as an escape, so that a terminal cannot be driven by it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if invisible(c) else c for c in text)


def shown(text: str, limit: int = SHOWN_LENGTH) -> str:
    """Foreign text made printable and, when longer than `limit` characters, cut in the middle."""
    if len(text) > limit:
        half = (limit - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return printable(text)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class FusecheckError(Exception):
    """Base of all errors. `str()` is one printable line: file, tensor, problem, found, wanted, remedy."""

    exit_code: int = 70

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        found: object = None,
        wanted: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = file
        self.tensor = tensor
        self.found = None if found is None else str(found)
        self.wanted = None if wanted is None else str(wanted)
        self.remedy = remedy

    def __str__(self) -> str:
        where = ": ".join(shown(part) for part in (self.file, self.tensor) if part is not None)
        facts = [f"found {shown(self.found)}"] if self.found is not None else []
        facts += [f"wanted {shown(self.wanted)}"] if self.wanted is not None else []
        line = ": ".join(part for part in (where, printable(self.problem), ", ".join(facts)) if part)
        return f"{line}; {printable(self.remedy)}" if self.remedy else line


class UsageError(FusecheckError):
    """The command line asks for what cannot be: no such source, an OUT that is taken, an unknown repository."""

    exit_code = 2


class CheckpointError(FusecheckError):
    """The checkpoint is malformed or not supported. Nothing was written, and a retry gives the same answer."""

    exit_code = 3


class UnsupportedCheckpoint(CheckpointError):
    """The checkpoint is sound, but there is no fused form of it, or none that this version knows."""


class NoFusedForm(UnsupportedCheckpoint):
    """One group cannot be fused without loss (its parts differ in dtype); `--keep-split` leaves such groups split."""


class SystemFailure(FusecheckError):
    """The environment failed: space, permission, I/O, network, a source that changed under us. A retry may help."""

    exit_code = 4

    @classmethod
    def from_os(cls, error: OSError, file: str, doing: str) -> SystemFailure:
        """Name the file and the action, which `OSError` itself forgets for read, write and fsync."""
        return cls(f"cannot {doing}: {error.strerror or error}", file=file)


class Interrupted(BaseException):
    """A signal asked the run to stop; what was half done is cleaned up on the way out. exit_code = 128 + signal.

    No FusecheckError, so that whoever goes on without what failed (a source that is gone) never goes on after a signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} (signal {signum})")
        self.signum = signum
        self.exit_code = 128 + signum
