"""plan, run, finalize over folders: any part, any order, any number of times, dead in the middle; one commit, one result."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import job_kills
import pytest
from checkpoints import INDEX, SIDE_FILES, Spec, specs, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import folder_files
from quantised import FAMILIES, KINDS, checkpoint

import fusecheck
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.lanes import Lane, OnBytes, Sent, send
from fusecheck.operations.finalize import FinalizeReport
from fusecheck.operations.run import RunReport, which_part
from fusecheck.parts import part_of
from fusecheck.planned import from_text, read_plan
from fusecheck.reader import Publisher, Reader

Call = Callable[..., tuple[int, str, str]]
SPEC = Spec(files=9, num_hidden_layers=6, hidden_size=32, vocab_size=512, side_files=SIDE_FILES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "in", SPEC)
    return tmp_path / "in"


@pytest.fixture
def plan(source: Path, tmp_path: Path) -> Path:
    return planned(source, tmp_path / "out")


def planned(source: Path, out: Path, **options: object) -> Path:
    plan = out.with_name(f"{out.name}.json")
    plan.write_text(fusecheck.make_plan(source, out, **options).text)  # type: ignore[arg-type]
    return plan


def reference(source: Path) -> dict[str, bytes]:
    """What a local fuse makes, at a place of the same depth, so that its provenance is the same too."""
    fusecheck.fuse(source, source.with_name("reference"))
    return folder_files(source.with_name("reference"))


def command(*arguments: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fusecheck", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_eight_parts_as_processes_in_any_order_two_of_them_twice_and_one_killed(
    source: Path, plan: Path, tmp_path: Path
) -> None:
    wanted = reference(source)
    order = random.Random(3).sample([*range(8), 2, 5], 10)  # noqa: S311
    for at in range(0, 10, 2):
        pair = [command("run", plan, "--part", f"{part}/8", "--json") for part in order[at : at + 2]]
        if at == 4:
            pair[0].kill()
        for number, process in enumerate(pair):
            told, complaint = process.communicate(timeout=120)
            if at == 4 and number == 0:
                killed = order[at]
                continue
            assert process.returncode == 0, complaint
            assert json.loads(told)["verdict"] in {"written", "already_done"}
    again = command("run", plan, "--part", f"{killed}/8")
    assert again.wait(timeout=120) == 0
    again.communicate()
    assert fusecheck.finalize(plan).verdict == "committed"
    assert folder_files(tmp_path / "out") == wanted


def test_the_plan_is_the_same_each_time_and_says_nothing_of_the_machine(source: Path, call: Call) -> None:
    code, text, told = call("plan", source, source.with_name("out"))
    assert (code, text) == (0, call("plan", source, source.with_name("out"), "--json", "-q")[1])
    value = json.loads(text)
    assert value["schema_version"] == 1
    assert value["verdict"] == "planned"
    assert [item["name"] for item in value["objects"]] == [f"model-{n:05d}-of-00009.safetensors" for n in range(1, 10)]
    assert value["estimate"]["bytes_written"] == sum(item["size"] for item in value["objects"] + value["beside"])
    assert "to read" in told
    assert text == fusecheck.make_plan(source, source.with_name("out")).text
    other = fusecheck.make_plan(source, source.with_name("out"), max_shard_size="20KB")
    assert json.loads(other.text)["digest"] != value["digest"]


def test_what_it_takes_is_worked_out_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take as long as the rest; and of a folder each byte counts once, however many ranks are cut out of it."""
    plan = planned(source, tmp_path / "out", target="vllm-sharded", tp=4)
    estimate = read_plan(plan).estimate
    assert estimate.bytes_read == sum(map(len, folder_files(source).values()))
    monkeypatch.setattr("fusecheck.work._estimate", None)
    fusecheck.run_part(plan)
    fusecheck.finalize(plan)
    assert estimate.bytes_written == sum(
        len(data) for name, data in folder_files(tmp_path / "out").items() if name != "fusecheck.json"
    )


def test_what_a_plan_reads_may_not_change(source: Path, plan: Path, tmp_path: Path) -> None:
    fusecheck.run_part(plan, part=0, parts=2)
    shard = source / "model-00009-of-00009.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for act in (lambda: fusecheck.run_part(plan, part=1, parts=2), lambda: fusecheck.finalize(plan)):
        with pytest.raises(SystemFailure, match=r"model-00009-of-00009.safetensors: changed since it was planned"):
            act()
    assert not (tmp_path / "out" / "fusecheck.json").exists()
    with pytest.raises(UsageError, match="the work of another plan"):
        planned(source, tmp_path / "out")


@pytest.mark.parametrize("change", ["new", "gone"])
def test_side_files_belong_to_what_was_planned(source: Path, plan: Path, change: str) -> None:
    if change == "new":
        (source / "extra.json").write_text("{}")
    else:
        (source / "vocab.json").unlink()
    with pytest.raises(SystemFailure, match=f"is {change} since it was planned"):
        fusecheck.run_part(plan)


def test_finalize_names_the_part_to_run_again(plan: Path, call: Call, tmp_path: Path) -> None:
    for part in (0, 2, 3):
        fusecheck.run_part(plan, part=part, parts=4)
    code, told, complaint = call("finalize", plan, "--json")
    assert code == 4
    assert "--part 1/4" in complaint
    assert "--part 2/4" not in complaint
    assert json.loads(told)["verdict"] == "error"
    fusecheck.run_part(plan, part=1, parts=4)
    lost = next((tmp_path / "out").glob("model-*.safetensors"))
    lost.unlink()
    with pytest.raises(SystemFailure, match=f"{lost.name}: does not stand"):
        fusecheck.finalize(plan)


def test_an_object_that_was_overwritten_is_no_object_of_the_plan(plan: Path, tmp_path: Path) -> None:
    fusecheck.run_part(plan)
    shard = next((tmp_path / "out").glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(SystemFailure, match="does not stand at OUT with its record"):
        fusecheck.finalize(plan)
    assert fusecheck.run_part(plan).written == (shard.name,)
    assert fusecheck.finalize(plan).verdict == "committed"


@pytest.mark.parametrize("changed", [False, True])
def test_a_slow_twin_leaves_a_committed_result_alone(
    source: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, changed: bool
) -> None:
    """It looked at OUT when nothing stood there; by the time that it writes, all is done and the source may be another."""
    wanted = reference(source)

    def slow(lane: Lane, reader: Reader, publisher: Publisher, on_bytes: OnBytes, *, sha256: bool) -> tuple[Sent, ...]:
        monkeypatch.setattr("fusecheck.parts.send", send)
        fusecheck.run_part(plan)
        fusecheck.finalize(plan)
        if changed:
            shard = source / "model-00001-of-00009.safetensors"
            shard.write_bytes(shard.read_bytes()[:-8] + b"\xff" * 8)
        return send(lane, reader, publisher, on_bytes, sha256=sha256)

    monkeypatch.setattr("fusecheck.parts.send", slow)
    if changed:
        with pytest.raises(SystemFailure, match="changed while it was read"):
            fusecheck.run_part(plan)
    else:
        assert fusecheck.run_part(plan).verdict == "already_done"
        assert fusecheck.finalize(plan).verdict == "already_done"
    assert folder_files(tmp_path / "out") == wanted


def test_a_record_of_which_a_bit_fell_over_is_none(source: Path, plan: Path, tmp_path: Path) -> None:
    fusecheck.run_part(plan)
    path = next((tmp_path / "out" / ".fusecheck").glob("0*.json"))
    text = path.read_bytes()
    for at in range(0, len(text) - 1, 23):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(SystemFailure, match="does not stand at OUT with its record"):
            fusecheck.finalize(plan)
    assert len(fusecheck.run_part(plan).written) == 1
    fusecheck.finalize(plan)
    assert folder_files(tmp_path / "out") == reference(source)


def test_of_racing_finalizes_one_commits_and_the_others_find_it_done(source: Path, plan: Path, tmp_path: Path) -> None:
    wanted = reference(source)
    fusecheck.run_part(plan)
    with ThreadPoolExecutor(6) as pool:
        verdicts = sorted(done.verdict for done in pool.map(lambda _: fusecheck.finalize(plan), range(6)))
    assert verdicts == ["already_done"] * 5 + ["committed"]
    assert folder_files(tmp_path / "out") == wanted
    assert fusecheck.run_part(plan, part=1, parts=3).verdict == "already_done"
    assert fusecheck.fuse(source, tmp_path / "out").verdict == "already_done"
    assert fusecheck.verify(tmp_path / "out", exact_only=True).notes == ()


def test_parts_that_run_at_once_and_the_same_part_twice(source: Path, plan: Path, tmp_path: Path) -> None:
    wanted = reference(source)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: fusecheck.run_part(plan, part=n % 3, parts=3), range(8)))
    assert fusecheck.finalize(plan).verdict == "committed"
    assert folder_files(tmp_path / "out") == wanted


@pytest.mark.parametrize("name", ["notes.txt", "model-00001-of-00009.safetensors", "fusecheck.json", "sub/file"])
def test_a_foreign_out_is_refused(source: Path, plan: Path, call: Call, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_bytes(b"{}")
    for arguments in (("run", plan), ("plan", source, tmp_path / "out"), ("finalize", plan)):
        code, _, complaint = call(*arguments)
        assert (code, "not empty" in complaint) == (2, True)
    assert folder_files(tmp_path / "out") == {name: b"{}"}


def test_a_folder_in_the_place_of_the_manifest_ends_it(plan: Path, tmp_path: Path) -> None:
    fusecheck.run_part(plan, part=0, parts=2)
    (tmp_path / "out" / "fusecheck.json").mkdir()
    for act in (fusecheck.run_part, fusecheck.finalize):
        with pytest.raises(UsageError, match="no longer what was"):
            act(plan)


def test_something_foreign_that_comes_later_is_refused_too(plan: Path, tmp_path: Path) -> None:
    fusecheck.run_part(plan)
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"stray")
    with pytest.raises(UsageError, match="holds what this plan does not put there"):
        fusecheck.finalize(plan)


@pytest.mark.parametrize("how", ["gone", "another"])
@pytest.mark.parametrize("name", ["vocab.json", "config.json", "SHA256SUMS", INDEX, "fusecheck.json"])
def test_a_result_that_was_spoilt_is_said_to_be(source: Path, tmp_path: Path, name: str, how: str) -> None:
    plan = planned(source, tmp_path / "out", checksums=True)
    fusecheck.run_part(plan)
    fusecheck.finalize(plan)
    path = tmp_path / "out" / name
    data = path.read_bytes()
    path.unlink()
    if how == "another":
        path.write_bytes(data[:-1] + b" ")
    elif name == "fusecheck.json":  # then it is as if nobody had committed
        assert fusecheck.finalize(plan).verdict == "committed"
        return
    with pytest.raises(UsageError, match=f"no longer what was: found {name}"):
        fusecheck.finalize(plan)


@pytest.mark.parametrize("small", [0, 32 << 20])
@pytest.mark.parametrize("again", [fusecheck.run_part, fusecheck.finalize])
def test_a_copy_of_a_result_is_one_and_a_spoilt_one_is_none(
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    again: Callable[[Path], RunReport | FinalizeReport],
    small: int,
) -> None:
    """Records know an object by the time of its last write, which a copy or a run that died has changed."""
    monkeypatch.setattr("fusecheck.parts._SMALL", small)
    fusecheck.run_part(plan)
    fusecheck.finalize(plan)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    os.utime(shards[3])
    for _ in range(2):
        assert again(plan).verdict == "already_done"
    shards[3].write_bytes(shards[3].read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match=f"no longer what was: found {shards[3].name}"):
        again(plan)
    shards[3].unlink()
    with pytest.raises(UsageError, match=f"no longer what was: found {shards[3].name}"):
        again(plan)


def test_a_second_finalize_writes_nothing(plan: Path, tmp_path: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}

    fusecheck.run_part(plan)
    fusecheck.finalize(plan)
    before = state()
    assert fusecheck.finalize(plan).verdict == "already_done"
    assert state() == before


@pytest.mark.parametrize(
    "options",
    [{"checksums": True}, {"max_shard_size": "20KB"}, {"max_shard_size": "5GB", "checksums": True}],
    ids=str,
)
def test_options_give_what_fuse_gives(source: Path, tmp_path: Path, options: dict[str, object]) -> None:
    fusecheck.fuse(source, tmp_path / "reference", **options)  # type: ignore[arg-type]
    plan = tmp_path / "plan.json"
    plan.write_text(fusecheck.make_plan(source, tmp_path / "out", **options).text)  # type: ignore[arg-type]
    for part in range(3):
        fusecheck.run_part(plan, part=part, parts=3)
    fusecheck.finalize(plan)
    assert folder_files(tmp_path / "out") == folder_files(tmp_path / "reference")


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[int]]:
    """(N, parts of N in the order in which they run): each, some of them twice."""
    total = draw(st.integers(1, 9))
    return total, draw(st.permutations([*range(total), *draw(st.lists(st.integers(0, total - 1), max_size=2))]))


QUANTISED = st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(FAMILIES)))
OPTIONS: dict[str, st.SearchStrategy[object]] = {
    "max_shard_size": st.sampled_from(["1KB", "20KB", "5GB"]),
    "checksums": st.booleans(),
    "keep_split": st.booleans(),
    "drop_tied_lm_head": st.booleans(),
    "experts": st.sampled_from(["per-expert", "stacked", "split"]),
}
RANKS: dict[str, st.SearchStrategy[object]] = {
    "target": st.just("vllm-sharded"),
    "tp": st.sampled_from([1, 2, 4]),
    "ranks": st.sampled_from([None, "0", "1,0"]),
}


@settings(max_examples=15)
@given(
    model=specs() | QUANTISED,
    options=st.fixed_dictionaries({}, optional=OPTIONS) | st.fixed_dictionaries(RANKS),
    order=orders(),
    fused=st.booleans(),
)
def test_all_parts_in_any_order_make_what_fuse_makes(
    model: Spec | tuple[str, str], options: dict[str, Any], order: tuple[int, list[int]], *, fused: bool
) -> None:
    """And what fuse refuses, plan refuses in the same words. `fused`: what is read is what fuse has made."""
    with TemporaryDirectory() as folder:
        source, out, wanted = (Path(folder, name) for name in ("in", "out", "wanted"))
        _ = write_checkpoint(source, model) if isinstance(model, Spec) else checkpoint(*model).write(source)
        if fused:
            with suppress(CheckpointError):
                fusecheck.fuse(source, Path(folder, "fused"))
                source = Path(folder, "fused")
        try:
            fusecheck.fuse(source, wanted, **options)
        except FusecheckError as refusal:
            with pytest.raises(type(refusal), match=f"^{re.escape(str(refusal))}$"):
                planned(source, out, **options)
            return
        plan = planned(source, out, **options)
        for part in order[1]:
            fusecheck.run_part(plan, part=part, parts=order[0])
        assert fusecheck.finalize(plan).verdict == "committed"
        assert folder_files(out) == folder_files(wanted)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "is no plan"),
        (b"[]", "is no plan of a known schema"),
        (b'{"schema_version": 1, "verdict": "planned"}', "is no plan: KeyError"),
        (None, "was edited"),
    ],
)
def test_what_is_no_plan_is_refused(plan: Path, text: bytes | None, told: str) -> None:
    plan.write_bytes(plan.read_bytes().replace(b'"keep_split": false', b'"keep_split": true') if text is None else text)
    with pytest.raises(UsageError, match=told):
        fusecheck.run_part(plan)


def test_a_plan_with_any_byte_changed_is_none(plan: Path) -> None:
    text = plan.read_bytes()
    for at in range(0, len(text) - 1, 3):
        with pytest.raises(UsageError):
            from_text(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :], "plan")
        with pytest.raises(UsageError):
            from_text(text[:at], "plan")


@pytest.mark.parametrize("name", ["nothing", "in", "plan.json/x", "x" * 300, "a\0b"])
def test_where_there_is_no_plan(source: Path, name: str) -> None:
    with pytest.raises(UsageError):
        fusecheck.run_part(source.parent / name)


def test_another_version_may_not_go_on(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusecheck, "__version__", "9.9.9")
    with pytest.raises(SystemFailure, match="planned by another version"):
        fusecheck.run_part(plan)


@pytest.mark.parametrize("out", ["in", "in/out", "."])
def test_out_is_neither_src_nor_around_it(source: Path, tmp_path: Path, out: str) -> None:
    with pytest.raises(UsageError, match="OUT is SRC"):
        fusecheck.make_plan(source, tmp_path / out)


def test_out_is_no_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="a symbolic link"):
        fusecheck.make_plan(source, tmp_path / "link")


def test_out_is_no_link_later_either(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    for act in (fusecheck.run_part, fusecheck.finalize):
        with pytest.raises(UsageError, match="a symbolic link"):
            act(plan)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_one_place_has_one_spelling(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {fusecheck.make_plan(*place).text for place in (("in", "out"), ("./in/", "out//"), (Path("in"), "./out"))}
    assert len(texts) == 1
    del source


def test_a_folder_that_is_not_here_is_not_looked_for_on_the_hub(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    source.rename(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(fusecheck.make_plan("models/tiny", tmp_path / "out").text)
    monkeypatch.chdir("models")
    with pytest.raises(UsageError, match="models/tiny: SRC does not exist here"):
        fusecheck.run_part("../plan.json")


def test_a_place_that_json_cannot_hold_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Unicode text"):
        fusecheck.make_plan(source, tmp_path / "\udcff")


def test_space_is_looked_at_before_the_first_byte(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusecheck.target.free_space", lambda _: 1000)
    with pytest.raises(SystemFailure, match="not enough free space"):
        fusecheck.run_part(plan)
    assert folder_files(tmp_path / "out") == {}


def test_a_hub_id_is_no_source_of_a_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"test/tiny: SRC does not exist here: wanted a folder .* hf://owner/name"):
        fusecheck.make_plan("test/tiny", tmp_path / "out")


@pytest.mark.parametrize("total", [1, 2, 3, 8, 20])
def test_parts_are_all_objects_once_and_balanced(plan: Path, total: int) -> None:
    document = read_plan(plan)
    shares = [part_of(document, part, total) for part in range(total)]
    assert sorted(number for share in shares for number in share) == list(range(len(document.objects)))
    loads = [sum(document.objects[number].size for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(item.size for item in document.objects)


def test_more_parts_than_anybody_needs_cost_nothing(plan: Path, tmp_path: Path) -> None:
    assert fusecheck.run_part(plan, part=10**9, parts=10**12).verdict == "already_done"
    assert len(fusecheck.run_part(plan, part=3, parts=10**12).written) == 1
    with pytest.raises(SystemFailure, match="run again: --part 0/1000000000000, --part 1/"):
        fusecheck.finalize(plan)
    assert not (tmp_path / "out" / "fusecheck.json").exists()


@pytest.mark.parametrize(
    ("part", "parts", "environment", "wanted"),
    [
        (None, None, {}, (0, 1)),
        ("3/8", None, {}, (3, 8)),
        ("3/8", 8, {}, (3, 8)),
        (None, 4, {"JOB_COMPLETION_INDEX": "2"}, (2, 4)),
        (None, 4, {"SLURM_ARRAY_TASK_ID": "0"}, (0, 4)),
        ("8/8", None, {}, "no such part"),
        ("1/0", None, {}, "no such part"),
        ("-1/8", None, {}, "no part"),
        ("1/8", 9, {}, "no part"),
        (None, 4, {}, "needs to be told"),
        (None, 4, {"SLURM_ARRAY_TASK_ID": "4"}, "--array=0-3"),
        (None, 4, {"JOB_COMPLETION_INDEX": "2", "SLURM_ARRAY_TASK_ID": "2"}, (2, 4)),
        (None, 4, {"JOB_COMPLETION_INDEX": "2", "SLURM_ARRAY_TASK_ID": "1"}, "two schedulers"),
        (None, 4, {"JOB_COMPLETION_INDEX": "", "SLURM_ARRAY_TASK_ID": "1"}, (1, 4)),
        (None, 4, {"JOB_COMPLETION_INDEX": "x"}, "no number of a part"),
    ],
)
def test_which_part_this_is(part: str | None, parts: int | None, environment: dict[str, str], wanted: object) -> None:
    if isinstance(wanted, str):
        with pytest.raises(UsageError, match=wanted):
            which_part(part, parts, environment)
    else:
        assert which_part(part, parts, environment) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_death_at_any_moment_leaves_nothing_half_written(tmp_path: Path, seed: int) -> None:
    script = Path(job_kills.__file__)
    done = subprocess.run(
        [sys.executable, script, "2", str(10 * seed)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 outputs, all right at last" in done.stdout
    del tmp_path
