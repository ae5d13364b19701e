"""What a release is: an sdist from the tree, a wheel from that sdist, and both hold what they should and nothing else."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoints import Spec, fused, read_checkpoint, write_checkpoint

import fusecheck
from fusecheck import __version__

ROOT = Path(__file__).parent.parent
NAME = f"fusecheck-{__version__}"
NEEDED = ("blake3", "rich", "safetensors", "typer")
"""What fuse and verify need of the dependencies: neither torch nor the hub's client."""
NO_NETWORK = re.compile(
    r"Could not find a version|No matching distribution|Failed to establish|Temporary failure|Network is unreachable"
    r"|Connection (?:refused|reset|timed out)|ProxyError|ReadTimeout|ResolutionImpossible",
)
"""What pip says then; the last where a package is pinned and none is found. Pins that clash stop scripts/test before."""
BUILD_SDIST = "import sys, hatchling.build\nhatchling.build.build_sdist(sys.argv[1])\n"


def test_every_public_name_is_there() -> None:
    for name in fusecheck.__all__:
        assert getattr(fusecheck, name) is not None
        assert name in dir(fusecheck)


def pip(*arguments: object, python: Path | None = None) -> None:
    """pip into another interpreter, under the project's pins; a test that it cannot serve without a network is skipped."""
    of = ["--python", str(python)] if python is not None else []
    pins = ["--constraint", str(ROOT / "scripts" / "constraints.txt")]
    command = [sys.executable, "-m", "pip", *of, *map(str, arguments), "--quiet", "--disable-pip-version-check", *pins]
    done = subprocess.run(command, capture_output=True, check=False, encoding="utf-8", timeout=300)
    if done.returncode and NO_NETWORK.search(done.stderr):
        pytest.skip(f"pip has no network: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def package_files() -> set[str]:
    """Every file of the package, relative to the root."""
    found = (path for path in (ROOT / "fusecheck").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has hatchling: this one, or else a new environment."""
    if find_spec("hatchling") is not None:
        return Path(sys.executable)
    place = tmp_path_factory.mktemp("builder")
    venv.create(place, with_pip=False, symlinks=True)
    pip("install", "hatchling", python=place / "bin" / "python")
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def sdist(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from the tree and unpacked."""
    place = tmp_path_factory.mktemp("sdist")
    subprocess.run([builder, "-c", BUILD_SDIST, place], cwd=ROOT, check=True, capture_output=True, timeout=60)
    with tarfile.open(place / f"{NAME}.tar.gz") as archive:
        assert {member.name.partition("/")[0] for member in archive.getmembers()} == {NAME}
        assert all(member.isfile() or member.isdir() for member in archive.getmembers())
        archive.extractall(place, filter="data")
    return place / NAME


@pytest.fixture(scope="module")
def wheel(sdist: Path, builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist alone, as an installer would."""
    place = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if builder == Path(sys.executable) else []
    pip("wheel", "--no-deps", *isolation, "--wheel-dir", place, sdist)
    (found,) = place.iterdir()
    return found


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fusecheck, installed from the wheel into an environment that has neither torch nor the hub's client."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    pip("install", *NEEDED, python=python)
    pip("install", "--no-deps", wheel, python=python)
    return place / "bin" / "fusecheck"


def test_the_sdist_holds_the_package_its_tests_and_nothing_else(sdist: Path) -> None:
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert {name for name in found if name.startswith("fusecheck/")} == package_files()
    assert {name.partition("/")[0] for name in found} == {
        *("fusecheck", "tests", "scripts", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"),
        *("PKG-INFO", ".gitignore"),
    }
    assert {"scripts/test", "scripts/constraints.txt", "tests/conftest.py", "tests/goldens/golden.py"} <= found
    assert not [name for name in found if re.search(r"__pycache__|\.pyc$|\.whl$|\.safetensors$|\.egg-info", name)]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"fusecheck-{__version__}-py3-none-any.whl"
    about = f"{NAME}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        assert archive.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        for name in package_files():
            assert archive.read(name) == (ROOT / name).read_bytes()
    own = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert found == package_files() | own
    assert "fusecheck/py.typed" in found


def test_the_metadata_is_the_project_s(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("fusecheck", __version__, "Apache-2.0")
    assert found["Requires-Python"] == ">=3.11"
    needed = {re.match(r"[\w-]+", line)[0] for line in found.get_all("Requires-Dist", []) if "extra ==" not in line}  # type: ignore[index]
    assert needed == {*NEEDED, "huggingface-hub", "torch"}
    assert str(found.get_payload()).startswith("# fusecheck\n")


def test_the_version_stands_in_one_place() -> None:
    places = [ROOT / "pyproject.toml", *sorted((ROOT / "fusecheck").rglob("*.py"))]
    assert [path.name for path in places if f'"{__version__}"' in path.read_text(encoding="utf-8")] == ["__init__.py"]
    first = re.search(r"^## \[?([0-9][^\] ]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == __version__


def test_an_installed_wheel_fuses_and_verifies_without_torch(command: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        line = [str(command), *map(str, arguments)]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, check=False, encoding="utf-8", timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = write_checkpoint(tmp_path / "src", Spec(files=2))
    assert run("--version") == f"fusecheck {__version__}\n"
    assert run("fuse", "src", "out").startswith("fused src -> out\n")
    assert read_checkpoint(tmp_path / "out") == fused(source)
    assert run("verify", "out").endswith("EQUAL: out (proved: exact)\n")
    shutil.rmtree(tmp_path / "src")
    assert run("verify", "out", "--quiet").endswith("EQUAL: out (proved: exact)\n")
    assert run("unfuse", "out", "back").startswith("unfused out -> back\n")
    assert read_checkpoint(tmp_path / "back") == source
