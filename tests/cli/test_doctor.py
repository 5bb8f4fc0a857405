"""The doctor looks at this very machine; what is missing carries its cost."""

import json
from pathlib import Path

import pytest

from megatron_dapo.cli import doctor as module
from megatron_dapo.cli.doctor import doctor, examine, version_of
from megatron_dapo.cli.main import main

AREAS = {"versions", "accelerator", "compatibility", "memory", "limits", "network", "files", "clock", "programs"}


def test_every_area_is_looked_at(tmp_path: Path):
    findings = examine(tmp_path / "runs" / "not" / "yet")
    assert {finding.area for finding in findings} == AREAS
    assert all(finding.cost for finding in findings if finding.status != "ok")
    named = {finding.name: finding for finding in findings}
    assert named["torch"].found == version_of("torch") and named["torch"].status == "ok"
    assert not (tmp_path / "runs").exists()


def test_command(tmp_path: Path, capsys):
    assert main(["doctor", "--directory", str(tmp_path), "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} <= {"ok", "note", "warn"}
    assert main(["doctor", "--directory", str(tmp_path)]) == 0
    assert "megatron-core" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "status"), [(None, "fail"), ("0.12.0", "warn"), ("0.16.1", "ok"), ("0.17.0rc0", "ok")]
)
def test_versions_are_compared(version: str | None, status: str, monkeypatch):
    monkeypatch.setattr(module, "version_of", lambda package: version if package == "megatron-core" else "1")
    found = {finding.name: finding for finding in module._packages()}
    assert found["megatron-core"].status == status


def test_a_missing_package_that_a_run_needs_fails_the_command(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "version_of", lambda package: None)
    shown, works = doctor(tmp_path)
    assert not works and "no rollouts" in shown


def test_a_taken_port(monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        rows = {finding.name: finding for finding in module._network()}
        assert rows[f"port {taken.getsockname()[1]}"].status == "warn"
