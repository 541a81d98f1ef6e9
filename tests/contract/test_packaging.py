"""What is shipped, what it asks for, and the house rules that no linter knows."""

import importlib.metadata
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = [
    REPOSITORY / "kernels/kvkeep_kernels",
    REPOSITORY / "storage/kvkeep_storage",
    REPOSITORY / "service/kvkeep_service",
    REPOSITORY / "clients/python/kvkeep_client",
]
MAX_LINES = 350
OURS = {"kvkeep", "kvkeep-client"}


def product_files() -> list[Path]:
    return sorted(path for room in PRODUCT for path in room.rglob("*.py"))


def pins() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def needed(requirement: Requirement, seen: set[str]) -> Iterator[str]:
    """Names of everything that installing ``requirement`` on this machine brings in."""
    key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
    if key in seen:
        return
    seen.add(key)
    yield canonicalize_name(requirement.name)
    for text in importlib.metadata.requires(requirement.name) or []:
        child = Requirement(text)
        extras = requirement.extras or {""}
        if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
            yield from needed(child, seen)


def installed_names() -> list[str]:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    asked = ["kvkeep", "kvkeep-client[cli]", *pyproject["dependency-groups"]["dev"]]
    seen: set[str] = set()
    names = {name for text in asked for name in needed(Requirement(text), seen)}
    return sorted(names - OURS)


def test_everything_installed_is_at_its_pin() -> None:
    pinned = pins()
    # The CPU build of torch is the pinned release with a local version behind it.
    installed = {
        name: Version(Version(importlib.metadata.version(name)).public)
        for name in installed_names()
    }
    assert installed == {name: pinned.get(name) for name in installed}


def test_the_pins_allow_what_the_projects_ask_for() -> None:
    for project in OURS:
        for text in importlib.metadata.requires(project) or []:
            requirement = Requirement(text)
            pin = pins()[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin, prereleases=True), text


def test_the_client_asks_only_for_httpx() -> None:
    requirements = [Requirement(r) for r in importlib.metadata.requires("kvkeep-client") or []]
    plain = [r.name for r in requirements if r.marker is None]
    extra = {r.name for r in requirements if r.marker is not None}
    assert plain == ["httpx2"]
    assert extra == {"typer", "rich"}


def test_the_service_never_asks_for_the_client() -> None:
    names = [Requirement(text).name for text in importlib.metadata.requires("kvkeep") or []]
    assert "kvkeep-client" not in names
    assert "torch" in names


def test_both_distributions_install_one_command_each() -> None:
    scripts = {
        script.name: script.value
        for name in OURS
        for script in importlib.metadata.distribution(name).entry_points.select(
            group="console_scripts"
        )
    }
    assert scripts == {
        "kvkeep-server": "kvkeep_service.cli:main",
        "kvkeep": "kvkeep_client.cli:main",
    }


def test_both_distributions_carry_the_same_version_and_licence() -> None:
    versions = {importlib.metadata.version(name) for name in OURS}
    licences = {
        (REPOSITORY / folder / "LICENSE").read_bytes() for folder in (".", "clients/python")
    }
    assert len(versions) == 1
    assert len(licences) == 1


@pytest.mark.parametrize("room", PRODUCT, ids=lambda room: room.name)
def test_a_room_is_marked_as_typed(room: Path) -> None:
    assert (room / "py.typed").exists()


def test_every_file_can_be_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()}
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_ratio_always_means_the_fraction_kept() -> None:
    banned = "compression" + "_ratio"
    guilty = [p for p in product_files() if banned in p.read_text(encoding="utf-8")]
    assert guilty == []


def test_test_folders_are_packages() -> None:
    folders = {path.parent for path in (REPOSITORY / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_composed_redis_never_evicts_and_survives_a_restart() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))
    command = compose["services"]["redis"]["command"]
    settings = dict(pairwise(command))
    assert settings["--maxmemory-policy"] == "noeviction"
    assert settings["--appendonly"] == "yes"


def test_the_image_runs_as_nobody_special_and_at_the_pins() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001", "USER 10001"]
    installs = [line for line in lines if "pip install" in line and "==" not in line]
    assert installs
    assert [line for line in installs if "-c constraints.txt" not in line] == []
