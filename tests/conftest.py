"""Hypothesis profiles (few examples by default, more by FUSECHECK_EXAMPLES, the same in CI), and the command in process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

from fusecheck import cli

EXAMPLES = int(os.environ.get("FUSECHECK_EXAMPLES", "30"))

settings.register_profile("default", max_examples=EXAMPLES, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """fusecheck in this process: (exit code, stdout, stderr)."""
    for name in ("FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)

    def run_here(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fusecheck", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return (caught.value.code, *capsys.readouterr())

    return run_here
