"""README says what is true: its options are the command line's, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from checkpoints import cli

from shardesd.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


BATCH = (ROOT / "docs" / "batch.md").read_text("utf-8")


def options(name: str = "scan") -> dict[str, object]:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    return {name: option for option in command.params for name in option.opts if name.startswith("--")}


@pytest.mark.parametrize("name", [name for name in options() if name != "--help"])
def test_every_option_is_in_the_table_with_its_default(name: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith("| `--") and f"`{name}" in line)
    default = options()[name].default
    if default not in (None, False, True, ()):
        assert f"`{default}`" in row
    assert len(row.split("|")[3].strip()) > 10


def test_the_table_names_no_option_that_is_not_there() -> None:
    named = set(re.findall(r"--[a-z-]+", "\n".join(re.findall(r"^\| `--.*", README, re.M))))
    assert named - {"--no-filter-zeros"} <= set(options())


OWN = sorted({(command, name) for command in ("batch", "run") for name in options(command)} - {("batch", "--help")})


@pytest.mark.parametrize(("command", "name"), [pair for pair in OWN if pair[1] not in {*options(), "--help"}])
def test_every_option_of_a_batch_is_in_its_table(command: str, name: str) -> None:
    row = next(line for line in BATCH.splitlines() if line.startswith("| `--") and f"`{name}" in line)
    default = options(command)[name].default  # type: ignore[attr-defined]
    if default not in (None, False, True, ()):
        assert f"`{default}`" in row
    assert command in row.split("|")[2]


def test_the_tables_of_a_batch_name_no_option_that_is_not_there() -> None:
    named = set(re.findall(r"--[a-z-]+", "\n".join(re.findall(r"^\| `--.*", BATCH, re.M))))
    assert named <= {*options("batch"), *options("run")}


def test_a_batch_takes_what_a_scan_takes() -> None:
    of_one_model = {"--revision", "--base", "--adapter", "--minus", "--lora-alpha", "--allow-residual-base", "--view"}
    assert set(options()) - of_one_model <= set(options("batch"))


def test_every_link_leads_to_a_file() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_help_names_every_command() -> None:
    result = cli("--help")
    assert result.exit_code == 0
    words = "scan inspect refit batch run summarize models cache doctor demo --version"
    assert all(word in result.stdout for word in words.split())
    assert cli("--version").stdout.startswith("shardesd 0.")
