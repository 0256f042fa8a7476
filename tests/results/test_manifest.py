from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import harness
from harness.results import manifest as module
from harness.results.manifest import manifest


def test_a_manifest_is_json_and_says_where_and_with_what():
    made = manifest(["python", "-m", "harness"])
    assert json.loads(json.dumps(made)) == made
    assert set(made) == {"date", "command", "versions", "hardware", "git"}
    assert made["versions"]["harness"] == harness.__version__
    assert {"python", "torch", "transformers", "xgrammar", "llguidance", "triton"} <= set(
        made["versions"]
    )
    assert made["hardware"]["cores"] >= 1
    assert made["hardware"]["cpu"]
    assert made["date"].endswith("+00:00")


def test_a_package_that_is_not_there_has_a_null_version(monkeypatch):
    monkeypatch.setattr(module, "_PACKAGES", ("no-such-package",))
    assert manifest([])["versions"]["no-such-package"] is None


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/some/where/harness/__main__.py", "a=1"], ["python", "-m", "harness", "a=1"]),
        (["/usr/bin/grammar-draft-harness", "a=1"], ["grammar-draft-harness", "a=1"]),
        ([], []),
    ],
)
def test_no_machine_path_is_kept_of_the_program(argv, typed):
    assert manifest(argv)["command"] == typed


def test_nothing_in_a_manifest_names_the_home_or_the_checkout():
    text = json.dumps(manifest(["python"]))
    assert str(Path.home()) not in text
    assert str(Path(harness.__file__).parent) not in text


def test_the_gpu_is_named_with_its_driver(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(module, "_output", lambda *command: "570.1\n570.1")
    gpu = manifest([])["hardware"]["gpu"]
    assert (gpu["name"], gpu["count"], gpu["driver"]) == ("GPU X", 2, "570.1")


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "harness"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "harness/__init__.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    return package


def test_a_clean_checkout_gives_its_commit_and_a_changed_one_is_dirty(checkout):
    clean = module._git_state(checkout)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "__init__.py").write_text("changed = True\n")
    assert module._git_state(checkout) == {"commit": clean["commit"], "dirty": True}


def test_outside_a_checkout_git_is_null(tmp_path):
    assert module._git_state(tmp_path) == {"commit": None, "dirty": None}


def test_a_package_installed_below_a_foreign_checkout_has_no_commit(checkout):
    installed = checkout / "site-packages" / "harness"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert module._git_state(installed) == {"commit": None, "dirty": None}
