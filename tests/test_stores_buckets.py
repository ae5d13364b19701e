"""Buckets: what is read is what was listed, or there is an error; what is put is whole, or nothing is there."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import obstore
import pytest
from az_server import CONTAINER, AzServer
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemorySource
from s3_server import BUCKET, Faults, S3Server

from fusecheck import gather
from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.lanes import Lane, send
from fusecheck.plan import Block, PlannedFile
from fusecheck.reader import Source, StoredFile
from fusecheck.stores import Target, Windows, bucket, bucket_publisher, open_publisher, open_source
from fusecheck.stores.bucket import failure
from fusecheck.stores.bucket_publisher import MAX_PARTS, MIB, part_size, put_memory
from fusecheck.stores.bucket_source import BucketSource
from fusecheck.stores.patience import Patience, Pause
from fusecheck.stores.windows import HELD
from fusecheck.work import ALLOWED, ahead

pytestmark = pytest.mark.filterwarnings("default:::moto", "default:::botocore", "default:::flask")

WHERE = f"s3://{BUCKET}/models/tiny"
BIG = random.Random(1).randbytes(3 * MIB)  # noqa: S311
FILES = {
    "config.json": b"{}",
    "model.safetensors": BIG,
    "1_Pooling/config.json": b"[]",
    "odd name #1%20ü.txt": b"odd",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    server.reset()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for name, data in FILES.items():
        server.put(f"models/tiny/{name}", data)
    server.put("models/tiny-other/config.json", b"beside the prefix")
    return server


@pytest.fixture
def target(s3: S3Server) -> Iterator[Target]:
    del s3
    target = open_publisher(f"s3://{BUCKET}/out")
    yield target
    target.close()


def read(source: Source, file: str, offset: int = 0, size: int | None = None) -> bytes:
    buffer = bytearray(len(FILES[file]) - offset if size is None else size)
    source.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


def blocks(data: bytes, size: int = MIB) -> Iterator[memoryview]:
    """As a copy loop gives them: one buffer, used again and again."""
    buffer = memoryview(bytearray(size))
    for at in range(0, len(data), size):
        part = data[at : at + size]
        buffer[: len(part)] = part
        yield buffer[: len(part)]


@pytest.mark.parametrize("cut_every", [0, 2])
def test_a_prefix_reads_as_what_lies_there(s3: S3Server, cut_every: int) -> None:
    s3.faults.cut_every = cut_every
    source = open_source(WHERE)
    assert {name: file.size for name, file in source.files().items()} == {n: len(d) for n, d in FILES.items()}
    draw = random.Random(2)  # noqa: S311

    def one(_: int) -> None:
        file = draw.choice(sorted(FILES))
        start, stop = sorted(draw.sample(range(len(FILES[file]) + 1), 2))
        assert read(source, file, start, stop - start) == FILES[file][start:stop]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(20)))
    assert sum("list-type" in seen.query for seen in s3.asked("GET")) == 1
    assert {"if-match"} <= set.intersection(*(set(seen.headers) for seen in s3.asked("GET", "/models/")))


def test_a_store_that_ignores_ranges_is_refused(s3: S3Server) -> None:
    source = open_source(WHERE)
    s3.faults.ignore_range = True
    with pytest.raises(SystemFailure, match="the store ignores ranges"):
        read(source, "model.safetensors", 1, 10)


@pytest.mark.parametrize("ignored", [False, True])
def test_an_object_that_is_replaced_is_an_error_never_a_mix(s3: S3Server, ignored: bool) -> None:  # noqa: FBT001
    s3.faults.ignore_if_match = ignored
    source = open_source(WHERE)
    assert read(source, "model.safetensors", 0, 10) == BIG[:10]
    s3.put("models/tiny/model.safetensors", BIG[::-1])
    with pytest.raises(SystemFailure, match="changed while it was read"):
        read(source, "model.safetensors", 10, 10)
    assert read(source, "config.json") == b"{}"


def test_a_plan_holds_to_what_it_froze(s3: S3Server) -> None:
    frozen = open_source(WHERE).files()
    s3.put("models/tiny/new.txt", b"came later")
    again = open_source(WHERE, frozen=frozen)
    assert again.files() == frozen
    assert read(again, "model.safetensors") == BIG
    s3.put("models/tiny/config.json", b"[]")
    with pytest.raises(SystemFailure, match=r"config\.json: changed since it was planned"):
        open_source(WHERE, frozen=frozen)
    with pytest.raises(SystemFailure, match="gone since it was planned"):
        open_source(WHERE, frozen={"lost": StoredFile(1, {})})


def test_a_console_s_folders_are_no_files(s3: S3Server) -> None:
    for key in ("", "1_Pooling/", "empty-folder/"):
        s3.put(f"models/tiny/{key}", b"")
    s3.put("models/tiny/empty", b"")
    s3.put("models/tiny/config.json/", b"")
    source = open_source(WHERE)
    assert list(source.files()) == sorted([*FILES, "empty"])
    assert read(source, "config.json") == FILES["config.json"], "a marker is not the file of its name"
    s3.put("models/tiny/a//b", b"")
    with pytest.raises(UsageError, match="no path"):
        open_source(WHERE)


def test_a_prefix_may_hold_any_letters_and_many_pages(s3: S3Server) -> None:
    prefix = "a b%2f#+ü/&=?"
    target = open_publisher(f"s3://{BUCKET}/{prefix}")
    target.check()
    target.put("a+b c%41.txt", blocks(b"abc"), 3)
    for number in range(1001):
        s3.put(f"{prefix}/x/{number:04}", b"x")
    files = open_source(f"s3://{BUCKET}/{prefix}").files()
    assert list(files) == ["a+b c%41.txt", *(f"x/{number:04}" for number in range(1001))]
    assert target.list() == files
    assert target.read("a+b c%41.txt") == b"abc"


def test_azure_s_listing_names_contents_as_its_answers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with AzServer() as az:
        for name, value in az.environment.items():
            monkeypatch.setenv(name, value)
        target = open_publisher(f"az://{CONTAINER}/deep/out")
        target.check()
        data = {"a": b"0123", "b": bytes(9 * MIB)}
        put = {name: target.put(name, blocks(text), len(text)) for name, text in data.items()}
        assert target.list() == put == {name: target.have(name) for name in put}
        source = open_source(f"az://{CONTAINER}/deep/out")
        assert {name: source.files()[name] for name in put} == put
        assert read(source, "a", 1, 2) == b"12"
        az.blobs["deep/out/a"] = b"3210"
        with pytest.raises(SystemFailure, match="changed while it was read"):
            read(source, "a", 1, 2)
        assert [target.commit(b"{}"), target.commit(b"{}")] == [True, False]


@pytest.mark.parametrize("drip", [0, 1])
def test_bodies_that_end_early_again_and_again_have_an_end(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, drip: int
) -> None:
    source = open_source(WHERE)
    monkeypatch.setattr(source, "_pause", Pause(Patience(first=0.001)))
    monkeypatch.setattr(BucketSource, "_drain", lambda *_: (drip, None))
    s3.seen.clear()
    with pytest.raises(SystemFailure, match="ends early"):
        read(source, "model.safetensors")
    assert len(s3.seen) == Patience().tries


def test_a_pass_over_a_bucket_in_windows(s3: S3Server) -> None:
    source = open_source(WHERE)
    ranges = [("model.safetensors", at, 1000) for at in range(0, len(BIG) - 1000, 1000)]
    before = len(s3.seen)
    with Windows(source, ranges, largest=MIB) as reader:
        for item in ranges:
            buffer = bytearray(1000)
            reader.read_into(item[0], item[1], memoryview(buffer))
            assert buffer == BIG[item[1] : item[1] + 1000]
    assert len(s3.seen) - before == reader.requests == 3


def test_a_closed_source_ends_its_readers(s3: S3Server) -> None:
    source = open_source(WHERE)
    asked = len(s3.seen)
    source.close()
    with pytest.raises(SystemFailure, match="was closed"):
        read(source, "config.json")
    assert len(s3.seen) == asked


def test_what_cannot_be_opened(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such bucket"):
        open_source("s3://another-bucket/x")
    with pytest.raises(UsageError, match="no such bucket"):
        open_publisher("s3://another-bucket/x").check()
    with pytest.raises(UsageError, match="there is nothing"):
        open_source(f"s3://{BUCKET}/none")
    with pytest.raises(UsageError, match="cannot be written"):
        open_publisher("hf://a/b")
    s3.faults.deny = True
    with pytest.raises(SystemFailure, match="access denied") as caught:
        open_source(WHERE)
    assert not any(word in str(caught.value) for word in ("http", "secret", "Signature", "XML"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(UsageError, match="plain http to another machine"):
        open_source(WHERE)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SystemFailure, match=r"pip install 'fusecheck\[cloud\]'"):
        open_source(WHERE)


@given(st.integers(0, 48 * 1024**4))
def test_parts_are_few_and_small(size: int) -> None:
    part = part_size(size)
    assert part * MAX_PARTS >= size
    assert part == 8 * MIB or part * MAX_PARTS < size + MAX_PARTS * MIB


def test_a_large_object_goes_in_parts(s3: S3Server, target: Target) -> None:
    data = random.Random(3).randbytes(19 * MIB + 7)  # noqa: S311
    found = target.put("model.safetensors", blocks(data, 3 * MIB), len(data))
    assert s3.objects()["out/model.safetensors"] == data
    assert found == target.have("model.safetensors") == StoredFile(len(data), found.identity)
    assert found.identity["etag"].endswith('-3"')
    assert sum("partNumber" in seen.query for seen in s3.asked("PUT")) == 3
    assert s3.open_multiparts() == 0


def ranks(count: int, size: int) -> tuple[Lane, MemorySource]:
    """A matrix cut into as many files by columns, and where it lies."""
    rows = [(Block("in", rank, size, 1, count),) for rank in range(count)]
    lane = tuple(PlannedFile(f"rank-{rank}", b"head", (strip,)) for rank, strip in enumerate(rows))
    return lane, MemorySource({"in": random.Random(4).randbytes(count * size)})  # noqa: S311


def test_a_lane_may_have_any_number_of_files(s3: S3Server, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "BLOCK_BYTES", 512)
    lane, source = ranks(20, 2000)
    send(lane, source, target, lambda _: None)
    made = [s3.objects()[f"out/{file.path}"].removeprefix(b"head") for file in lane]
    assert bytes(chain.from_iterable(zip(*made, strict=True))) == source.contents["in"]


def test_files_that_are_written_together_share_the_memory_of_one(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    class Counted:
        def put(self, store: object, key: str, blocks: Iterator[bytes], **settings: int) -> None:
            held.append(settings["chunk_size"] * settings["max_concurrency"])
            put(store, key, b"".join(blocks))  # type: ignore[arg-type]

    put, head = obstore.put, obstore.head
    monkeypatch.setitem(sys.modules, "obstore", Counted())
    monkeypatch.setattr(Counted, "head", staticmethod(head), raising=False)
    monkeypatch.setattr(gather, "BLOCK_BYTES", 512)
    monkeypatch.setattr(bucket_publisher, "part_size", lambda size: size // 2)
    monkeypatch.setattr(bucket_publisher, "_HELD", 20_000)
    lane, source = ranks(4, 2000)
    send(lane, source, target, lambda _: None)
    assert len(held) == len(lane)
    assert sum(held) <= 20_000


@given(st.lists(st.integers(0, 64 << 30), min_size=1, max_size=16))
def test_up_to_16_ranks_take_no_more_memory_than_one(sizes: list[int]) -> None:
    """Of 1 TB: what they hold while they are written together, the windows of the source give."""
    puts = put_memory(sizes)
    assert puts + ahead(puts) <= ALLOWED
    assert ahead(put_memory(sizes[:1])) == HELD
    assert sum(part_size(size) for size in sizes if size > 8 * MIB) <= puts


def test_closing_a_target_ends_who_waits(s3: S3Server) -> None:
    target = open_publisher(f"s3://{BUCKET}/out")
    s3.faults.silent = "/out/"
    threading.Timer(0.1, target.close).start()
    with pytest.raises(SystemFailure, match="was closed"):
        target.have("a")
    s3.faults.silent = ""


class Signalled(BaseException):
    """As a signal handler raises."""


@pytest.mark.parametrize("size", [MIB, 30 * MIB])
@pytest.mark.parametrize("error", [SystemFailure("source gone"), KeyboardInterrupt(), Signalled(), RuntimeError("bug")])
def test_a_put_that_fails_leaves_nothing(s3: S3Server, target: Target, size: int, error: BaseException) -> None:
    def failing() -> Iterator[memoryview]:
        yield from blocks(bytes(size - 1))
        raise error

    with pytest.raises(type(error)) as caught:
        target.put("model.safetensors", failing(), size)
    assert caught.value is error
    assert s3.open_multiparts() == 0
    assert target.have("model.safetensors") is None
    assert target.list() == {}


@pytest.mark.parametrize("given_size", [20 * MIB - 1, 20 * MIB + 1])
def test_a_put_of_another_size_leaves_nothing(s3: S3Server, target: Target, given_size: int) -> None:
    with pytest.raises(FusecheckError, match="another size"):
        target.put("model.safetensors", blocks(bytes(20 * MIB)), given_size)
    assert s3.open_multiparts() == 0
    assert target.have("model.safetensors") is None


def test_a_refused_part_aborts_the_rest(s3: S3Server, target: Target) -> None:
    s3.faults.refuse_part = 2
    with pytest.raises(SystemFailure, match=r"s3://bucket/out/model\.safetensors: cannot write: access denied"):
        target.put("model.safetensors", blocks(bytes(64 * MIB)), 64 * MIB)
    assert s3.open_multiparts() == 0
    assert target.have("model.safetensors") is None


@pytest.mark.parametrize(
    "faults", [Faults(ignore_if_none_match=True), Faults(refuse_if_none_match=True)], ids=["ignored", "refused"]
)
def test_a_store_without_if_none_match_is_found(
    s3: S3Server, target: Target, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    monkeypatch.setattr(bucket, "RETRIES", 0)
    target.check()
    assert target.list() == {}
    s3.faults = replace(faults)
    target = open_publisher(f"s3://{BUCKET}/out")
    for verb in (target.check, lambda: open_publisher(f"s3://{BUCKET}/out").commit(b"{}")):
        with pytest.raises(SystemFailure, match="If-None-Match"):
            verb()
        assert not [key for key in s3.objects() if key.startswith("out/")]
    allowed = open_publisher(f"s3://{BUCKET}/out", allow_unconditional=True)
    assert [allowed.commit(b"{}"), allowed.commit(b"{}")] == [True, False]
    with pytest.raises(UsageError, match="another committed result"):
        allowed.commit(b"[]")
    assert s3.objects()["out/fusecheck.json"] == b"{}"


def test_a_commit_that_meets_another_one_under_way_is_tried_again(s3: S3Server, target: Target) -> None:
    target.check()
    s3.faults.conflicts = 2
    assert target.commit(b"{}")
    assert s3.faults.conflicts == 0
    assert s3.objects()["out/fusecheck.json"] == b"{}"


def test_versions_are_held_to(s3: S3Server) -> None:
    s3.version()
    target = open_publisher(f"s3://{BUCKET}/out")
    first = target.put("a", blocks(b"one"), 3)
    assert first.identity["version"]
    assert target.put("a", blocks(b"two"), 3) != first


@pytest.mark.parametrize("endpoint", ["", "ht!tp://x:secret@y"])
def test_a_panic_of_the_library_is_a_failure(s3: S3Server, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    del s3
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SystemFailure, match="check the endpoint") as caught:
        open_source(WHERE)
    assert "secret" not in str(caught.value)


class GenericError(Exception):
    """As obstore's, whose text is all there is."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Error performing GET https://b/region-credential?sig=S in 1s - HTTP error: tcp Connection refused",
            "connection refused",
        ),
        ("Error performing PUT http://169.254.169.254/latest/api/token - status code: 403 Forbidden", "no credentials"),
        ("Generic S3 error: Missing SecretAccessKey", "no credentials"),
        ("this normally indicates an incorrectly configured region", "another region"),
        ("GET https://b/x?sig=S - status code: 503 <Code>SlowDown</Code>", "the store answered 503: found SlowDown"),
        ("GET https://b/x?sig=S - status code: 404 <Code>NoSuchBucket</Code>", "no such bucket"),
        ("something about https://b/x?sig=S", "GenericError"),
    ],
)
def test_what_the_library_s_errors_become(text: str, words: str) -> None:
    found = str(failure(GenericError(text), "s3://b/x", "read"))
    assert words in found
    assert "sig" not in found
