"""The hub as a source: whatever its servers do, the bytes are those of the commit, or there is an error."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from hub_server import LARGE, Ills
from huggingface_hub import constants
from range_hub import RangeHub, RangeIlls

from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.reader import StoredFile
from fusecheck.stores import Windows, hosts, hub_tree, open_source
from fusecheck.stores.address import parse
from fusecheck.stores.hub_source import HubSource
from fusecheck.stores.patience import Patience

REPO = "test/tiny"
TOKEN = "hf_" + "secret" * 5
BIG = random.Random(1).randbytes(200_000)  # noqa: S311
FILES = {
    "config.json": b'{"model_type": "qwen3"}\n',
    "model-00001-of-00002.safetensors": BIG,
    "model-00002-of-00002.safetensors": BIG[::-1],
    "tokenizer.json": b"[" + b"1," * 100 + b"1]",
    "1_Pooling/config.json": b"{}",
    "with space #1.txt": b"odd",
}
SHARD = "model-00001-of-00002.safetensors"
QUICK = Patience(first=0.001, longest=0.01, told=0.2)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeHub]:
    with RangeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.add(REPO, FILES)
        yield hub


def opened(revision: str = "", frozen: dict[str, StoredFile] | None = None, patience: Patience = QUICK) -> HubSource:
    return HubSource(parse(f"hf://{REPO}{revision}"), frozen=frozen, patience=patience)


def read(source: HubSource, file: str, offset: int = 0, size: int | None = None) -> bytes:
    buffer = bytearray(len(FILES[file]) - offset if size is None else size)
    source.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


def check_ranges(source: HubSource, seed: int, count: int = 25) -> None:
    """Random ranges of random files, from four threads."""
    draw = random.Random(seed)  # noqa: S311

    def one(_: int) -> None:
        file = draw.choice(sorted(FILES))
        start, stop = sorted(draw.sample(range(len(FILES[file]) + 1), 2))
        assert read(source, file, start, stop - start) == FILES[file][start:stop]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(count)))


def check_token(hub: RangeHub) -> None:
    """The token goes to the hub, and nowhere else."""
    assert not [seen for seen in hub.seen if seen.host == "hub" and seen.authorization != f"Bearer {TOKEN}"]
    assert {seen.authorization for seen in hub.seen if seen.host == "store"} <= {None}


ILLS = {
    "none": RangeIlls(),
    "cut": RangeIlls(cut_every=3),
    "busy": RangeIlls(busy_every=4),
    "expiring": RangeIlls(uses=1),
    "all": RangeIlls(uses=5, cut_every=4, busy_every=7),
    "limited": RangeIlls(limited=3),
    "hop": RangeIlls(hop=True),
    "tag": RangeIlls(tag="0123456789abcdef0123456789abcdef-7"),
    "slow": RangeIlls(latency=0.002),
}


@pytest.mark.parametrize("name", ILLS)
def test_what_is_read_is_the_commit_whatever_goes_wrong(hub: RangeHub, name: str) -> None:
    ills = replace(ILLS[name])
    with hub.range_ill(ills):
        source = opened()
        assert {name: file.size for name, file in source.files().items()} == {n: len(d) for n, d in FILES.items()}
        for seed in range(2):
            check_ranges(source, seed)
        source.close()
    check_token(hub)
    assert (source.retries > 0) == (name not in {"none", "tag", "slow"})


def test_one_question_for_the_commit_one_listing_one_place_per_file(hub: RangeHub) -> None:
    source = opened()
    for seed in range(2):
        check_ranges(source, seed)
    for name in FILES:
        read(source, name)
    paths = hub.paths()
    assert sum("/revision/" in path for path in paths) == 1
    assert sum("/tree/" in path for path in paths) == 2  # two pages of four
    kept = [name for name, data in FILES.items() if len(data) < LARGE]
    assert source.resolves == len(FILES) - len(kept)
    assert [hub.resolved(SHARD), hub.resolved(SHARD.replace("1-", "2-"))] == [1, 1]
    before = source.requests
    for name in kept:
        read(source, name)
    assert source.requests - before == len(kept), "the hub serves them itself"
    assert source.requests == len(hub.seen)


def test_a_repository_that_was_renamed_is_found(hub: RangeHub) -> None:
    hub.renamed["old/name"] = REPO
    source = HubSource(parse("hf://old/name"), patience=QUICK)
    check_ranges(source, 1)
    check_token(hub)


def test_a_signed_url_is_renewed_once_for_all_threads(hub: RangeHub) -> None:
    source = opened()
    read(source, SHARD)
    barrier = threading.Barrier(8)

    def one(number: int) -> bytes:
        barrier.wait()
        return read(source, SHARD, number, 100)

    hub.key = "other"  # every URL that was given out is void now
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [BIG[number : number + 100] for number in range(8)]
    assert hub.resolved(SHARD) == source.resolves == 2


def test_a_cut_body_is_asked_for_again_from_where_it_ended(hub: RangeHub) -> None:
    source = opened()
    with hub.range_ill(RangeIlls(cut_every=2)):
        read(source, SHARD, 0, 1000)
        hub.ranges.clear()
        assert read(source, SHARD) == BIG
    starts = [int(span.removeprefix("bytes=").split("-")[0]) for span in hub.ranges]
    assert starts[0] == 0
    assert all(before < after for before, after in pairwise(starts))
    assert source.bytes_read == len(BIG) + 1000


@pytest.mark.parametrize("ills", [RangeIlls(), RangeIlls(cut_every=3, busy_every=4, uses=2)], ids=["well", "ill"])
def test_a_pass_in_windows_reads_the_commit_in_few_requests(hub: RangeHub, ills: RangeIlls) -> None:
    source = opened()
    ranges = [
        (file, at, min(777, len(BIG) - at)) for at in range(0, len(BIG), 777) for file in FILES if "model" in file
    ]
    before = source.requests
    with hub.range_ill(replace(ills)), Windows(source, ranges, largest=50_000) as reader:
        for file, at, size in ranges:
            buffer = bytearray(size)
            reader.read_into(file, at, memoryview(buffer))
            assert buffer == FILES[file][at : at + size]
    assert reader.requests == reader.planned == 2 * len(BIG) // 50_000
    if ills == RangeIlls():
        assert source.requests - before == reader.requests + source.resolves == 10


@pytest.mark.parametrize(
    ("ills", "words"),
    [
        (RangeIlls(no_ranges=True), "ignores ranges: found 200, wanted 206"),
        (RangeIlls(shift=1), "another range than asked for: found bytes 11-110/200000, wanted bytes 10-109/200000"),
        (RangeIlls(tag="f" * 64), "changed while it was read"),
        (RangeIlls(other_bytes=True), "changed while it was read"),
        (RangeIlls(busy_every=1), "answered 503"),
        (RangeIlls(limited=99), "answered 429"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_store_that_gives_something_else_is_refused(hub: RangeHub, ills: RangeIlls, words: str) -> None:
    source = opened()
    read(source, SHARD, 0, 1)
    asked = source.requests
    with hub.range_ill(ills), pytest.raises(SystemFailure, match=words) as caught:
        read(source, SHARD, 10, 100)
    assert source.requests - asked <= QUICK.tries
    assert "http" not in str(caught.value)
    assert "Signature" not in str(caught.value)


def test_a_url_that_is_refused_when_new_is_no_endless_loop(hub: RangeHub) -> None:
    source = opened()
    hub.ills.store_status = 403
    hub.repositories[REPO].commits[source.commit][SHARD].data.hex()
    with hub.range_ill(RangeIlls(uses=1)):
        hub.sign = lambda sha256: f"X-Signature={sha256}&n=1"  # type: ignore[method-assign]
        with pytest.raises(SystemFailure, match="refuses a new signed URL: it answered 403"):
            read(source, SHARD)
    assert source.resolves <= QUICK.tries


def test_a_store_whose_own_tag_changes_is_no_longer_the_same_file(hub: RangeHub) -> None:
    source = opened()
    with hub.range_ill(RangeIlls(tag="md5-{n}")):
        read(source, SHARD, 0, 10)
        with pytest.raises(SystemFailure, match="changed while it was read"):
            read(source, SHARD, 10, 10)


def test_a_store_that_names_the_content_as_the_hub_s_newer_one_does(hub: RangeHub) -> None:
    with hub.range_ill(RangeIlls(tag="e" * 64, xet="e" * 64)):
        assert read(opened(), SHARD) == BIG
    with hub.range_ill(RangeIlls(tag="e" * 64, xet="d" * 64)), pytest.raises(SystemFailure, match="changed"):
        read(opened(), SHARD)


def test_a_wait_that_the_store_asks_for_is_kept_by_all(hub: RangeHub) -> None:
    source = opened(patience=replace(QUICK, told=2))
    read(source, SHARD, 0, 1)
    hub.ranges.clear()
    start = time.monotonic()
    with hub.range_ill(RangeIlls(limited=1, retry_after="1")), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda at: read(source, SHARD, at, 9), range(4))) == [BIG[at : at + 9] for at in range(4)]
    assert time.monotonic() - start >= 1
    assert len(hub.ranges) == 5


def test_a_wait_without_end_is_a_failure_at_once(hub: RangeHub) -> None:
    source = opened()
    read(source, SHARD, 0, 1)
    hub.ranges.clear()
    with hub.range_ill(RangeIlls(limited=1, retry_after="3600")), pytest.raises(SystemFailure, match="found 3600 s"):
        read(source, SHARD)
    assert len(hub.ranges) == 1, "whoever is told to wait does not ask before"


def test_a_store_that_drips_is_given_up(hub: RangeHub) -> None:
    source = opened(patience=replace(QUICK, tries=3, stall=0.1))
    read(source, SHARD, 0, 1)
    hub.ranges.clear()
    with hub.ill(Ills(bytes_per_second=20)), pytest.raises(SystemFailure, match="sends next to nothing"):
        read(source, SHARD)
    assert len(hub.ranges) == 3


def test_content_that_nobody_names_is_not_taken(hub: RangeHub) -> None:
    with hub.range_ill(RangeIlls(nameless=True)):
        source = opened()
        for file in (SHARD, "config.json"):
            with pytest.raises(SystemFailure, match="does not say which content"):
                read(source, file)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("https://evil.example/x", "leads elsewhere"),
        ("//evil.example/x", "leads elsewhere"),
        ("?cursor=9", "leads elsewhere"),
        ("https://[x", "no URL"),
        ("?cursor=9&n={n}", "has no end"),
    ],
)
def test_a_listing_stays_with_the_hub_and_has_an_end(
    hub: RangeHub, monkeypatch: pytest.MonkeyPatch, link: str, words: str
) -> None:
    monkeypatch.setattr(hub_tree, "MAX_PAGES", 5)
    with hub.range_ill(RangeIlls(link=link)), pytest.raises(SystemFailure, match=words):
        opened()
    assert len(hub.seen) <= 6


def test_a_branch_that_moves_is_not_followed(hub: RangeHub) -> None:
    source = opened()
    hub.add(REPO, {name: data[::-1] for name, data in FILES.items()})
    check_ranges(source, 1)
    assert opened().commit != source.commit


def test_a_plan_is_read_without_another_listing(hub: RangeHub) -> None:
    planned = opened()
    hub.add(REPO, {name: data[::-1] for name, data in FILES.items()})
    before = len(hub.seen)
    source = opened(frozen=dict(planned.files()))
    assert len(hub.seen) == before
    check_ranges(source, 2)
    forged = {SHARD: StoredFile(len(BIG), {"commit": source.commit, "sha256": "0" * 64})}
    with pytest.raises(SystemFailure, match="changed"):
        read(opened(frozen=forged), SHARD, 0, 10)
    mixed = {**forged, "config.json": StoredFile(1, {"commit": "0" * 40, "oid": "0" * 40})}
    with pytest.raises(UsageError, match="not of one commit"):
        opened(frozen=mixed)


def test_gated_unknown_and_private(hub: RangeHub) -> None:
    with pytest.raises(UsageError, match="no such revision"):
        opened("@nope")
    hub.repositories[REPO].gated = True
    with pytest.raises(UsageError, match="gated repository"):
        read(opened(), SHARD)
    hub.repositories[REPO].token = "another"  # noqa: S105
    with pytest.raises(UsageError, match="neither a folder here nor a repository"):
        opened()
    assert TOKEN not in repr(hub.paths())


def test_a_redirect_may_not_lead_inward_nor_to_plain_http(hub: RangeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened()
    nowhere = "https://\u3002?Signature=1".encode().decode("latin-1")  # the client is stricter than urllib
    with hub.range_ill(RangeIlls(redirect=nowhere)), pytest.raises(SystemFailure, match="InvalidURL"):
        read(opened(), SHARD)
    for target, words in (
        ("http://10.0.0.1/x?Signature=1", "plain http"),
        ("ftp://example.org/x", "no URL"),
        ("https:///x", "no URL"),
        ("https://[x?Signature=1", "no URL"),
    ):
        with hub.range_ill(RangeIlls(redirect=target)), pytest.raises(SystemFailure, match=words) as caught:
            read(source, SHARD)
        assert "Signature" not in str(caught.value)
    found = {"127.0.0.1": ["18.0.0.1"], "inner.example": ["10.1.2.3"], "mapped.example": ["::ffff:169.254.169.254"]}
    monkeypatch.setattr(hosts, "addresses", lambda host: found.get(host, [host]))
    monkeypatch.setattr(hosts, "is_loopback", lambda host: host == "localhost")
    for host in ("10.255.0.1", "169.254.169.254", "inner.example", "mapped.example", "[::1]", "localhost:1"):
        ills = RangeIlls(redirect=f"https://{host}/x?Signature=1")
        with hub.range_ill(ills), pytest.raises(SystemFailure, match="private address"):
            read(source, SHARD)


def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(
    hub: RangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\xe9")
    with pytest.raises(UsageError, match="check HF_TOKEN") as caught:
        opened()
    assert TOKEN not in str(caught.value)
    assert not hub.seen


def test_offline_and_unreachable(hub: RangeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemFailure, match="HF_HUB_OFFLINE is set"):
        open_source(f"hf://{REPO}")
    assert not hub.seen
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemFailure, match=r"cannot be had from 127\.0\.0\.1:9: ConnectError"):
        opened()


def test_a_closed_source_ends_its_readers(hub: RangeHub) -> None:
    source = opened(patience=Patience(first=60))
    read(source, SHARD, 0, 1)
    hub.ills.bytes_per_second = 0
    with hub.range_ill(RangeIlls(busy_every=1)), ThreadPoolExecutor(1) as pool:
        future = pool.submit(read, source, SHARD)
        threading.Timer(0.2, source.close).start()
        with pytest.raises(SystemFailure, match="was closed"):
            future.result(10)


def test_signed_urls_are_not_logged(hub: RangeHub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        read(opened(), SHARD)
    assert hub.store in caplog.text
    assert "Signature" not in caplog.text
    assert TOKEN not in caplog.text


def test_a_read_beyond_the_end_is_a_bug(hub: RangeHub) -> None:
    source = opened()
    for offset, size in ((-1, 1), (len(BIG), 1), (0, len(BIG) + 1)):
        with pytest.raises(FusecheckError, match="beyond its end"):
            read(source, SHARD, offset, size)
    with pytest.raises(FusecheckError, match="no file"):
        source.read_into("none", 0, memoryview(b""))
    assert source.requests == len(hub.seen)
