"""Bent safetensors files, and one law about them: we accept what the library accepts, but for the reasons listed here.

`inputs(seed, numbers)` yields files, each from its own number, so that one failure repeats alone. `Judge.complaint`
says in which way our reader and the library (in a child process: it may crash or hang) break the law, or None.
"""

from __future__ import annotations

import json
import os
import random
import select
import struct
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import safetensors
from checkpoints import BITS, DTYPES

from fusecheck.checkpoint import read_shard
from fusecheck.errors import CheckpointError, invisible
from fusecheck.files import Files
from fusecheck.header import DTYPE_BITS
from fusecheck.json_text import MAX_DEPTH

Reading: TypeAlias = tuple[dict[str, str], list[tuple[str, str, list[int], str]]]
"""Metadata (absent, null and empty alike), then (name, dtype, shape, data as hex) by name."""

# ------------------------------------------------------------------------------------------------------ drawing files


@dataclass
class Entry:
    """One member of the header as raw JSON text: its key, then key and value of each field."""

    key: str
    fields: list[list[str]]

    def text(self, gap: str) -> str:
        inner = f",{gap}".join(f"{key}{gap}:{value}" for key, value in self.fields)
        return f"{self.key}:{gap}{{{inner}}}" if self.fields else self.key


@dataclass
class Draft:
    """A file in pieces, so that each can be bent alone. Pieces are raw JSON text, not values."""

    entries: list[Entry] = field(default_factory=list)
    data: bytes = b""
    before: str = ""
    gap: str = ""
    after: str = ""
    off_by: int = 0

    def encoded(self, encoding: str = "utf-8") -> bytes:
        body = f",{self.gap}".join(entry.text(self.gap) for entry in self.entries)
        header = f"{self.before}{{{self.gap}{body}{self.gap}}}{self.after}".encode(encoding, "surrogatepass")
        return struct.pack("<Q", max(0, len(header) + self.off_by)) + header + self.data


NAMES = (
    *("a", "b", "weight", "model.norm.weight", "\u00e9", "e\u0301", "\u5f20", "\U0001d518", '"', "\\", "/", ".", "a b"),
    *("__metadata__", "__metadata__x", "", " ", "\x7f", "\x80", "\u00a0", "\u200b", "\u202e", "\ufeff", "\u2028"),
    *("\u3164", "\x00", "\n", "dtype", "shape", "data_offsets", "x" * 300, "\ufffd", "\uffff", "\U000e0041", "\ue000"),
)
NUMBERS = (
    *("0", "1", "2", "3", "4", "8", "16", "-0", "-1", "00", "01", "0.0", "1.0", "1e1", "1E0", "1e-1", "1e400"),
    *(
        "-1e400",
        "0x1",
        "+1",
        "1_0",
        ".5",
        "5.",
        "true",
        "false",
        "null",
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        '"1"',
        "\uff11",
    ),
    *(str(2**n + d) for n in (7, 31, 32, 53, 61, 62, 63, 64, 65) for d in (-1, 0, 1)),
    *("9" * 20, "9" * 21, "1" * 400, "1" * 5000, "[]", "{}", "[1]", "1 1", "1,1", "", " "),
)
VALUES = (
    *("null", "true", "0", "1.5", '"x"', "[]", "{}", "[[]]", '{"a":1}', '"F32"', '{"F32":null}', '["F32"]', "nul"),
    *('"\\u0046\\u00332"', '"f32"', '"F32 "', '"F8_E4M3FN"', '"BFLOAT16"', '"F16\\u0000"', '"\\ud800"', '"\\udfff"'),
    *('"', "'x'", '"\\x"', '"\t"', "[1,]", "[,1]", "[1 2]", "{1:2}", "//", "/**/", '["F32",[],[0,4]]', "[0,0]"),
    *(name.join('""') for name in DTYPES),
)
SPACES = ("", "", "", " ", "\n", "\t", "\r", " \r\n\t ", "\x0b", "\x0c", "\u00a0", "\u3000", "\ufeff", "\x00", "\x85")


def quoted(text: str, choice: random.Random) -> str:
    """A JSON string; some of its characters spelled as escapes."""
    plain = json.dumps(text, ensure_ascii=False)
    if choice.random() < 0.8:
        return plain
    units = text.encode("utf-16-be", "surrogatepass").hex()
    escaped = [f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)]
    return '"' + "".join(choice.choice((unit, unit.upper().replace("\\U", "\\u"))) for unit in escaped) + '"'


def sound(choice: random.Random) -> Draft:
    """A file that both readers accept: up to four tensors of any dtype, one shape of each zero or more dimensions."""
    draft, at = Draft(), 0
    names = choice.sample(NAMES[:13], choice.randrange(5))
    for name in names:
        dtype = choice.choice(DTYPES)
        shape = [choice.randrange(4) for _ in range(choice.randrange(3))]
        if BITS[dtype] < 8:
            shape.append(4)
        size = BITS[dtype]
        for dimension in shape:
            size *= dimension
        offsets = [at, at + size // 8]
        at = offsets[1]
        fields = [["dtype", f'"{dtype}"'], ["shape", json.dumps(shape)], ["data_offsets", json.dumps(offsets)]]
        draft.entries.append(Entry(quoted(name, choice), [[f'"{key}"', value] for key, value in fields]))
    choice.shuffle(draft.entries)
    if choice.random() < 0.5:
        texts = ("null", "{}", '{"format":"pt"}', '{"a":"b","\\u00e9":"\\n"}')
        draft.entries.insert(
            choice.randrange(len(draft.entries) + 1), Entry(f'"__metadata__":{choice.choice(texts)}', [])
        )
    draft.data = choice.randbytes(at)
    draft.gap = choice.choice(SPACES[:8])
    draft.before, draft.after = choice.choice(SPACES[:8]), choice.choice(SPACES[:8])
    return draft


# ------------------------------------------------------------------------------------------------------ bending them


def _tensor(draft: Draft, choice: random.Random) -> Entry:
    found = [entry for entry in draft.entries if entry.fields]
    if not found:
        found = [Entry('"t"', [['"dtype"', '"U8"'], ['"shape"', "[]"], ['"data_offsets"', "[0, 1]"]])]
        draft.entries.append(found[0])
    return choice.choice(found)


def _numbers(entry: Entry, at: int) -> list[str]:
    inner = entry.fields[at][1].strip("[]") if at < len(entry.fields) else ""
    return inner.split(", ") if inner else []


def _put(entry: Entry, at: int, numbers: Sequence[str]) -> None:
    if at < len(entry.fields):
        entry.fields[at][1] = f"[{', '.join(numbers)}]"


def rename(draft: Draft, choice: random.Random) -> None:
    _tensor(draft, choice).key = quoted(choice.choice(NAMES), choice)


def repeat_name(draft: Draft, choice: random.Random) -> None:
    other = _tensor(draft, choice)
    name = other.key[1:2] if choice.random() < 0.1 else f"\\u{ord(other.key[1]):04x}"
    key = other.key if choice.random() < 0.5 else f'"{name}{other.key[2:]}'
    draft.entries.append(Entry(key, [list(pair) for pair in other.fields]))


def metadata(draft: Draft, choice: random.Random) -> None:
    texts = (*VALUES, '{"a":1}', '{"a":null}', '{"a":"b","a":"c"}', '{"a":"b","\\u0061":"b"}', '{"\\ud800":"x"}')
    draft.entries.append(Entry(f'"__metadata__":{choice.choice(texts)}', []))


def bend_number(draft: Draft, choice: random.Random) -> None:
    entry, at = _tensor(draft, choice), choice.choice((1, 2, 2))
    numbers = _numbers(entry, at) or ["0"]
    numbers[choice.randrange(len(numbers))] = choice.choice(NUMBERS)
    _put(entry, at, numbers)


def shift(draft: Draft, choice: random.Random) -> None:
    entry = _tensor(draft, choice)
    numbers, by = _numbers(entry, 2), choice.choice((-8, -2, -1, 1, 2, 8))
    which = choice.choice(((0,), (1,), (0, 1)))
    _put(
        entry,
        2,
        [str(int(n) + by) if i in which and n.isdecimal() and len(n) < 30 else n for i, n in enumerate(numbers)],
    )


def swap(draft: Draft, choice: random.Random) -> None:
    one, other = _tensor(draft, choice), _tensor(draft, choice)
    if one is other:
        _put(one, 2, _numbers(one, 2)[::-1])
        return
    ours, theirs = _numbers(one, 2), _numbers(other, 2)
    _put(one, 2, theirs)
    _put(other, 2, ours)


def dimensions(draft: Draft, choice: random.Random) -> None:
    """Another shape of the same product, or of one that wraps around 2**64."""
    entry = _tensor(draft, choice)
    huge = (["0", str(2**63), "4"], [str(2**63), "4", "0"], [str(2**32)] * 2, [str(2**61), "8"], [str(2**64 - 1), "0"])
    own = _numbers(entry, 1)
    more = choice.choice((["1", *own], [*own, "1"], own[::-1], own[1:], [*own, "0"], *huge))
    _put(entry, 1, more)


def dtype(draft: Draft, choice: random.Random) -> None:
    entry = _tensor(draft, choice)
    if entry.fields:
        entry.fields[0][1] = choice.choice(VALUES)


def bend_field(draft: Draft, choice: random.Random) -> None:
    fields = _tensor(draft, choice).fields
    what = choice.randrange(5)
    if what == 0:
        fields.append([choice.choice(('"x"', '"dtype"', '"Dtype"', '""', '"\\u0064type"')), choice.choice(VALUES)])
    elif what == 1 and len(fields) > 1:
        del fields[choice.randrange(len(fields))]
    elif what == 2:
        choice.shuffle(fields)
    elif what == 3:
        fields.append(list(choice.choice(fields)))
    else:
        choice.choice(fields)[1] = choice.choice(VALUES)


def as_list(draft: Draft, choice: random.Random) -> None:
    entry = _tensor(draft, choice)
    entry.key += f":[{','.join(value for _, value in entry.fields)}]"
    entry.fields = []


def nest(draft: Draft, choice: random.Random) -> None:
    depth = choice.choice((1, 2, 60, 61, 62, 63, 64, 65, 120, 124, 125, 126, 127, 128, 129, 1000, 200_000))
    opened, closed = choice.choice((("[", "]"), ('{"a":', "}")))
    text = opened * depth + "0" + closed * depth
    if choice.random() < 0.5:
        draft.entries.append(Entry(f'"deep":{text}', []))
    else:
        _tensor(draft, choice).fields.append(['"x"', text])


def space(draft: Draft, choice: random.Random) -> None:
    where = choice.choice(("before", "after", "gap"))
    setattr(draft, where, choice.choice(SPACES) * choice.choice((1, 1, 8)))


def length(draft: Draft, choice: random.Random) -> None:
    draft.off_by = choice.choice((-(10**6), -8, -1, 1, 8, 100, 10**8 + 1, 2**62))


def data(draft: Draft, choice: random.Random) -> None:
    what = choice.randrange(3)
    draft.data = (draft.data[: choice.randrange(len(draft.data) + 1)], draft.data + choice.randbytes(1), b"")[what]


def many(draft: Draft, choice: random.Random) -> None:
    for number in range(choice.choice((10, 300))):
        fields = [['"dtype"', '"I64"'], ['"shape"', "[0]"], ['"data_offsets"', "[0, 0]"]]
        draft.entries.append(Entry(f'"n{number}"', fields))


STRUCTURAL: tuple[Callable[[Draft, random.Random], None], ...] = (
    *(rename, repeat_name, metadata, bend_number, bend_number, shift, swap, dimensions, dtype, bend_field, bend_field),
    *(as_list, nest, space, length, data, many),
)


BYTES = (b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\\u0000", b"\xf4\x90\x80\x80", b"\\")


def _flip(blob: bytearray, choice: random.Random) -> None:
    if blob:
        at = choice.choice((choice.randrange(len(blob)), choice.randrange(min(8, len(blob)))))
        blob[at] = choice.choice((blob[at] ^ (1 << choice.randrange(8)), choice.randrange(256), *b'"\\{}[],:0-'))


def _splice(blob: bytearray, choice: random.Random) -> None:
    at, size = choice.randrange(len(blob) + 1), choice.randrange(1, 9)
    what = choice.randrange(4)
    if what == 0:
        del blob[at : at + size]
    elif what == 1:
        del blob[at:]
    elif what == 2:
        blob[at:at] = blob[at : at + size]
    else:
        blob[at:at] = choice.choice(BYTES)


def draw(seed: int, number: int) -> bytes:
    """Input `number` of `seed`: a sound file, bent up to three times as a structure and now and then as bytes."""
    choice = random.Random(f"{seed}:{number}")  # noqa: S311 - test data
    draft = sound(choice)
    for _ in range(choice.choice((0, 1, 1, 1, 2, 3))):
        choice.choice(STRUCTURAL)(draft, choice)
    roll = choice.random()
    encoding = choice.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig")) if roll < 0.01 else "utf-8"
    blob = bytearray(draft.encoded(encoding))
    if roll > 0.7:
        for _ in range(choice.choice((1, 1, 2, 8))):
            choice.choice((_flip, _splice))(blob, choice)
        if roll > 0.85:  # the length that fits again, or nothing behind it is ever read
            blob[:8] = struct.pack("<Q", max(0, len(blob) - 8 - len(draft.data)))
    return bytes(blob)


def inputs(seed: int, numbers: range) -> Iterator[tuple[int, bytes]]:
    """(number, file) of one seed."""
    return ((number, draw(seed, number)) for number in numbers)


# ------------------------------------------------------------------------------------ why we may refuse what it accepts


class _Strict(json.JSONDecoder):
    """Python's json, noting what another reader could read in another way."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._members, parse_float=self._number, parse_int=self._integer)
        self.found: set[str] = set()

    def _members(self, members: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(members)
        if len(found) != len(members):
            self.found.add("twice")
            found |= {f"{key} again {i}": value for i, (key, value) in enumerate(members)}  # one may be too deep
        return found

    def _number(self, _: str) -> int:
        self.found.add("number")
        return 0

    def _integer(self, digits: str) -> int:
        if not digits.isdecimal() or len(digits) > 20:
            self.found.add("number")
        return 0


def reasons(blob: bytes) -> set[str]:
    """What we may refuse although the library reads it, found by Python's json alone."""
    strict = _Strict()
    try:
        top = strict.decode(blob[8 : 8 + int.from_bytes(blob[:8], "little")].decode())
    except ValueError:
        return {"unreadable"}
    except RecursionError:
        return {"depth"}
    if _depth(top) > MAX_DEPTH:
        strict.found.add("depth")
    for name, entry in top.items():
        if name != "__metadata__":
            strict.found |= _entry_reasons(name, entry)
    return strict.found


def _entry_reasons(name: str, entry: object) -> set[str]:
    found = set()
    if not name:
        found.add("empty")
    hidden = (0x034F, 0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0, *range(0x17B4, 0x17B6), *range(0x180B, 0x1810))
    for character in name:
        ignorable = ord(character) in hidden or 0xFE00 <= ord(character) < 0xFE10 or 0xE0100 <= ord(character) < 0xE01F0
        if ignorable or unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp", "Cs"}:
            found.add("invisible")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return found | {"entry"} | ({"number"} if _words(entry) else set())
    if not isinstance(entry["dtype"], str):
        found.add("dtype")
    return found | ({"number"} if _words(entry) else set())


def _words(value: object) -> bool:
    """Whether true or false stands anywhere in a value."""
    if isinstance(value, dict):
        return any(map(_words, value.values()))
    return any(map(_words, value)) if isinstance(value, list) else isinstance(value, bool)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


STRICTER = {
    "the same key stands twice in one JSON object": "twice",
    "header holds something other than names, whole numbers, lists and objects": "number",
    "header entry is malformed": "entry",
    "a tensor has the empty name": "empty",
    "tensor name holds a control, bidirectional or invisible character": "invisible",
    "unknown dtype": "dtype",
    f"JSON is nested deeper than {MAX_DEPTH}": "depth",
}
"""Our words for a refusal that the library does not share -> the reason that `reasons` must find too."""


# ------------------------------------------------------------------------------------------------------- two readers


def read_by_us(path: Path) -> Reading | CheckpointError:
    with Files(path.parent) as files:
        try:
            shard, header = read_shard(files, path.name)
        except CheckpointError as error:
            return error
    blob = path.read_bytes()
    tensors = [(t.name, t.dtype, list(t.shape), blob[t.start : t.stop].hex()) for t in header.tensors]
    assert shard.metadata is header.metadata
    assert all(t.dtype in DTYPE_BITS for t in header.tensors)
    return dict(header.metadata or {}), sorted(tensors)


def read_by_library(path: Path) -> Reading | str:
    try:
        found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
    except safetensors.SafetensorError as error:
        return str(error)
    return metadata, sorted((name, e["dtype"], list(e["shape"]), bytes(e["data"]).hex()) for name, e in found)


class Library:
    """The library in a process of its own, which is started anew when it dies or hangs."""

    def __init__(self, seconds: float = 20) -> None:
        self.seconds = seconds
        self.deaths = 0
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def read(self, path: Path) -> Reading | str:
        """What the library reads, or the words of its refusal; a death or a hang counts as a refusal."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(f"{path}\n".encode())
            child.stdin.flush()
            ready = select.select([child.stdout], [], [], self.seconds)[0]
            line = child.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._end()
            self.deaths += 1
            return "the library died or hung"
        answer = json.loads(line)
        if isinstance(answer, str):
            return answer
        return answer[0], [(name, dtype, shape, data) for name, dtype, shape, data in answer[1]]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


@dataclass
class Judge:
    """Holds both readers to the law, and counts verdicts."""

    folder: Path
    reference: Library
    counts: dict[str, int] = field(default_factory=dict)

    def complaint(self, blob: bytes) -> str | None:
        """How our reader breaks the law on this file; None where it keeps it."""
        path = self.folder / f"fuzz-{os.getpid()}.safetensors"
        path.write_bytes(blob)
        try:
            ours = read_by_us(path)
        except Exception as error:  # noqa: BLE001 - any other exception is what we look for
            return f"foreign exception {type(error).__name__}: {error}"
        theirs = self.reference.read(path)
        if isinstance(ours, CheckpointError):
            return self._refused(ours, theirs, blob)
        if isinstance(theirs, str):
            return f"laxer: the library says {theirs}"
        self._count("both accept")
        why = reasons(blob)
        if why:
            return f"accepted in spite of {sorted(why)}"
        return None if ours == theirs else f"read differently: {ours} and {theirs}"

    def _refused(self, ours: CheckpointError, theirs: Reading | str, blob: bytes) -> str | None:
        if any(map(invisible, str(ours))):
            return f"an error that is no printable line: {str(ours)!r}"
        if isinstance(theirs, str):
            self._count("both refuse")
            return None
        reason = STRICTER.get(ours.problem)
        self._count(f"stricter: {reason}")
        found = reasons(blob)
        return None if reason in found else f"stricter for no reason ({sorted(found)}): {ours}"

    def _count(self, verdict: str) -> None:
        self.counts[verdict] = self.counts.get(verdict, 0) + 1


def minimal(blob: bytes, judge: Judge) -> bytes:
    """A smaller file with the same kind of complaint: pieces of header and data are dropped as long as it stays."""
    kind = (judge.complaint(blob) or "").partition(":")[0]
    size = max(1, len(blob) // 2)
    while size:
        at = 0
        while at < len(blob):
            header = int.from_bytes(blob[:8], "little")
            at = max(at, 8)
            gone = len(blob[at : min(at + size, 8 + header)])
            rest = struct.pack("<Q", max(0, header - gone)) + blob[8:at] + blob[at + size :]
            if len(rest) < len(blob) and (judge.complaint(rest) or "").partition(":")[0] == kind:
                blob = rest
            else:
                at += size
        size //= 2
    return blob


# --------------------------------------------------------------------------------------------------- index and config


def draw_json(text: str, seed: int, number: int) -> bytes:
    """JSON text with tokens exchanged, doubled or dropped, or bytes bent."""
    choice = random.Random(f"json:{seed}:{number}")  # noqa: S311 - test data
    tokens = [token for token in _tokens(text) if token.strip()]
    for _ in range(choice.choice((1, 1, 2, 4))):
        at, what = choice.randrange(len(tokens)), choice.randrange(6)
        scalars = [i for i, piece in enumerate(tokens) if piece not in "{}[],:"] or [0]
        other = choice.choice((*NUMBERS, *VALUES, *SPACES, *"{}[],:", choice.choice(tokens)))
        if what == 0:
            del tokens[at]
        elif what == 1:
            tokens.insert(at, other)
        elif what == 2:
            tokens[at:at] = tokens[at : at + choice.choice((1, 4))]
        elif what == 3:
            tokens[at] = other
        else:  # like for like, which is still JSON
            tokens[choice.choice(scalars)] = choice.choice((tokens[choice.choice(scalars)], '""', "0", '"\\u0061"'))
        tokens = tokens or ["{"]
    blob = bytearray("".join(tokens).encode("utf-8", "surrogatepass"))
    if choice.random() < 0.2:
        choice.choice((_flip, _splice))(blob, choice)
    return bytes(blob)


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    decoder = json.JSONDecoder()
    while at < len(text):
        if text[at] in "{}[],: \n":
            found.append(text[at])
            at += 1
        else:
            _, end = decoder.raw_decode(text, at)
            found.append(text[at:end])
            at = end
    return found


def serve() -> None:
    """The child: a path a line in, a reading a line out."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(read_by_library(Path(line[:-1]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
