"""A store that accepts a connection and then says nothing: whoever stops a run does not wait for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Spec, write_checkpoint

VERBS = {
    "inspect": ["inspect", "s3://bucket/model"],
    "verify": ["verify", "s3://bucket/model"],
    "fuse to": ["fuse", "{source}", "s3://bucket/out"],
    "fuse from": ["fuse", "s3://bucket/model", "{out}"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_signal_does_not_wait_for_a_silent_store(tmp_path: Path, verb: str) -> None:
    write_checkpoint(tmp_path / "in", Spec())
    places = {"source": str(tmp_path / "in"), "out": str(tmp_path / "out")}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        command = [sys.executable, "-m", "fusecheck", *(word.format(**places) for word in VERBS[verb])]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with process, silent.accept()[0]:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
            assert process.stderr is not None
            assert b"stopped by SIGTERM" in process.stderr.read()
    assert not (tmp_path / "out").exists()
