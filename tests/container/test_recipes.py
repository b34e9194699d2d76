"""The container recipes: linted, their shell checked, and installing what `make setup` installs. No
image is built here.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tr11ops.base.shipped import shipped

ROOT = Path(__file__).parents[2]
OCI, APPTAINER = (ROOT / "container" / name for name in ("Containerfile", "tr11.def"))
LINTER = Path(sys.executable).parent / "hadolint"


def sections() -> dict[str, str]:
    """%section -> its text, of the Apptainer definition; "" is its head."""
    parts = re.split(r"^%(\w+)\n", APPTAINER.read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def shell_of_oci() -> str:
    """The RUN instructions, as the image's shell gets them."""
    joined = OCI.read_text().replace("\\\n", " ")
    return "\n".join(
        line.removeprefix("RUN ") for line in joined.splitlines() if line.startswith("RUN ")
    )


def test_the_oci_recipe_passes_its_linter() -> None:
    # DL3008, DL3013: versions of Debian's packages and of what tr11 itself bounds are left to the
    # day of the build.
    done = subprocess.run(
        [str(LINTER), "--ignore", "DL3008", "--ignore", "DL3013", str(OCI)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["oci", "post", "runscript", "test"])
def test_the_shell_of_the_recipes_is_sound(name: str) -> None:
    text = shell_of_oci() if name == "oci" else sections()[name]
    checked = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr, bool(text.strip())) == (0, "", True)


def test_both_install_what_make_setup_installs() -> None:
    setup = (ROOT / "Makefile").read_text()
    torch = re.search(r"^TORCH \?= (\S+)$", setup, re.MULTILINE)
    deepspeed = re.search(r"deepspeed==[\d.]+", setup)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (
        torch
        and deepspeed
        and deepspeed[0] in project["project"]["optional-dependencies"]["trainer"]
    )
    backend = project["build-system"]["requires"]
    for text in (OCI.read_text(), APPTAINER.read_text()):
        installed = re.findall(r"[a-z]+(?:==|>=)[\d.]+", text)
        assert {torch[1], deepspeed[0], *backend} == set(installed)


def test_the_whole_package_is_copied() -> None:
    """What the wheel is made of: without one of these the build inside the image fails, or ships
    less.
    """
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    needed = {*wheel["only-include"], "pyproject.toml", "README.md", "LICENSE"}
    copied = {
        line.split()[0]: line.split()[1]
        for line in sections()["files"].splitlines()
        if line.strip()
    }
    assert copied == {name: f"/opt/tr11/{name}" for name in needed}
    ignored = (ROOT / "container" / "Containerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == needed
    assert ignored[0] == "*" and not any(fnmatch.fnmatch(".venv", line[1:]) for line in ignored[1:])
    assert all((ROOT / name).exists() for name in needed)


def test_the_recipes_ship_with_the_package() -> None:
    assert shipped("container", "Containerfile").read_text() == OCI.read_text()
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["sources"]
    assert sources["container"] == "tr11ops/shipped/container"
