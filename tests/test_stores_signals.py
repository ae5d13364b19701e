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
from memory_store import folder_files
from s3_server import BUCKET, S3Server

import fusecheck

pytestmark = pytest.mark.filterwarnings("default:::moto", "default:::botocore", "default:::flask")

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


@pytest.mark.parametrize(
    ("silent", "after", "words"),
    [
        ("/in/model-00001", 0, "inspect {source}"),
        ("/out/.fusecheck/0", 0, "finalize {plan}"),
        ("/out/model-rank-1", 0, "fuse {source} {out}-ranks --target vllm-sharded --tp 2"),
        ("/out/model-", 3, "verify {out}"),
        ("/in/model-", 3, "verify {out} --source {source}"),
    ],
)
def test_a_store_may_fall_silent_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str, after: int, words: str
) -> None:
    """After `after` answers: as many as there are headers."""
    write_checkpoint(tmp_path / "in", Spec(files=3))
    places = {"source": f"s3://{BUCKET}/in", "out": f"s3://{BUCKET}/out", "plan": str(tmp_path / "plan.json")}
    with S3Server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        for name, data in folder_files(tmp_path / "in").items():
            s3.put(f"in/{name}", data)
        Path(places["plan"]).write_text(fusecheck.make_plan(places["source"], places["out"]).text)
        fusecheck.run_part(places["plan"])
        if "verify" in words:
            fusecheck.finalize(places["plan"])
        s3.faults.silent_after = after
        s3.faults.silent = silent.replace("/out/", "/out-ranks/") if "ranks" in words else silent
        command = [sys.executable, "-m", "fusecheck", *(word.format(**places) for word in words.split())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            assert s3.heard.wait(60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
