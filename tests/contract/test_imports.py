"""The arrows between rooms, at run time: what import-linter promises about the text of the code."""

import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOM_FOLDERS = ["kernels", "storage", "service", "clients"]
PACKAGES = ["kvkeep_kernels", "kvkeep_storage", "kvkeep_service", "kvkeep_client"]


def loaded_after(statements: str, *, hidden: tuple[str, ...] = ()) -> set[str]:
    """Run ``statements`` in a fresh interpreter; return the top-level modules it loaded."""
    program = (
        "import sys\n"
        f"for name in {hidden!r}: sys.modules[name] = None\n"
        f"{statements}\n"
        "print(*{name.partition('.')[0] for name, m in sys.modules.items() if m is not None})\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_of(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = pkgutil.walk_packages(spec.submodule_search_locations, f"{package}.")
    return [package, *(module.name for module in found)]


@pytest.mark.parametrize("folder", ROOM_FOLDERS)
def test_a_room_folder_is_never_importable_under_its_own_name(folder: str) -> None:
    spec = importlib.util.find_spec(folder)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    inside = [p for p in places if p and Path(p).resolve().is_relative_to(REPOSITORY)]
    assert inside == [], "use make test, or set PYTHONSAFEPATH=1"


@pytest.mark.parametrize("folder", ["kernels", "storage", "service", "clients", "clients/python"])
def test_a_room_folder_is_no_package(folder: str) -> None:
    assert not (REPOSITORY / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_package_is_the_one_in_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve().is_relative_to(REPOSITORY)


def test_the_http_side_loads_without_torch() -> None:
    modules = [*modules_of("kvkeep_service.api"), "kvkeep_service.registry"]
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert loaded & {"torch", "triton", "transformers", "kvkeep_kernels"} == set()
    assert "kvkeep_service" in loaded


def test_storage_loads_without_torch() -> None:
    modules = modules_of("kvkeep_storage")
    loaded = loaded_after("\n".join(f"import {name}" for name in modules))
    assert loaded & {"torch", "triton", "transformers", "fastapi"} == set()
    assert "kvkeep_storage" in loaded


def test_the_client_needs_nothing_but_httpx() -> None:
    loaded = loaded_after("import kvkeep_client", hidden=("typer", "rich", "click"))
    server_side = {"torch", "fastapi", "pydantic", "numpy", "kvkeep_service", "kvkeep_storage"}
    assert loaded & server_side == set()
    assert "httpx2" in loaded
