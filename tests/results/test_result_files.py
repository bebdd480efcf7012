"""Names, atomic files and locks."""

from __future__ import annotations

import errno
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardesd.errors import NoSpace, ResultsError
from shardesd.results.files import Lock, atomic, file_stem, make_folders, remove_leftovers


@pytest.mark.parametrize(
    ("model_id", "revision", "stem"),
    [
        ("openai-community/gpt2", None, "openai-community--gpt2"),
        ("gpt2", "", "gpt2"),
        ("org/name", "main", "org--name@main"),
        ("org/name", "refs/pr/1", "org--name@refs%2Fpr%2F1"),
        ("org/name", "v1.0@x:y", "org--name@v1.0%40x%3Ay"),
        ("org/..", None, "org--.."),
        ("..", None, "%2E."),
        ("../../etc/passwd", None, "%2E.--..--etc--passwd"),
        (".hidden", None, "%2Ehidden"),
        ("-rf", None, "%2Drf"),
        ("a--b", None, "a-%2Db"),
        ("a-/b", None, "a%2D--b"),
        ("a/-b", None, "a--%2Db"),
        ("a\\b\n\x00", None, "a%5Cb%0A%2D"),
        ("模型 2", None, "模型%202"),
        ("", None, "unnamed"),
    ],
)
def test_stem(model_id: str, revision: str | None, stem: str) -> None:
    assert file_stem(model_id, revision) == stem


text = st.text(st.sampled_from("ab-/.@%~ é\u0301:\\*ü漢") | st.characters(exclude_characters="\0"), max_size=12)


@given(text, st.none() | text, text, st.none() | text)
@example("a-/b", None, "a/-b", None)
@example("a--b", None, "a/b", None)
@example("a@b", None, "a", "b")
@example("e\u0301", None, "é", None)
@example("x" * 300, None, "x" * 299, "y")
def test_stems_are_safe_and_differ(id_1: str, revision_1: str | None, id_2: str, revision_2: str | None) -> None:
    stems = file_stem(id_1, revision_1), file_stem(id_2, revision_2)
    for stem in stems:
        assert len(stem.encode()) <= 200
        assert stem[0] not in ".-"
        assert not set(stem) & set('/\\:*?"<>|\n\0 ')
        assert unicodedata.normalize("NFC", stem) == stem
    if "" not in (id_1, id_2):
        assert (stems[0] == stems[1]) == ((id_1, revision_1 or None) == (id_2, revision_2 or None))


def test_atomic_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("old")
    with atomic(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_atomic_leaves_nothing_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("old")

    def half() -> None:
        with atomic(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.csv"]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, NoSpace, "no space left in"),
        (errno.EDQUOT, NoSpace, "no space left in"),
        (errno.EACCES, ResultsError, "can't write into {folder}: permission denied; choose another --out"),
        (errno.EROFS, ResultsError, "can't write into {folder}: read-only file system; choose another --out"),
        (errno.EIO, ResultsError, "can't write {folder}/a.csv: input/output error"),
    ],
)
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_foreign_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, kind: type[Exception], words: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(kind) as raised, atomic(path) as file:
        file.write(b"new")
    assert words.format(folder=tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_full_device_is_no_space(tmp_path: Path) -> None:
    """The system's own ENOSPC, met when the buffer is flushed."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    path = tmp_path / "a.csv"

    def write() -> None:
        with atomic(path) as file:
            os.dup2(full := os.open("/dev/full", os.O_WRONLY), file.fileno())
            os.close(full)
            file.write(b"new")

    with pytest.raises(NoSpace, match="free some and run the same command again"):
        write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_place_of_the_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ResultsError, match=r"can't write into .*out.*: .*out is not a folder; choose another --out"):
        make_folders([tmp_path / "out" / below])


def test_leftovers_of_this_file_only(tmp_path: Path) -> None:
    ours, others = [".a.csv.12.tmp", ".a.csv.7.tmp"], [".a.csv.csv.12.tmp", ".b.a.csv.12.tmp", ".a.csv.x.tmp", "a.csv"]
    for name in ours + others:
        (tmp_path / name).touch()
    remove_leftovers([tmp_path / "a.csv"])
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_lock_names_its_holder_and_goes(tmp_path: Path) -> None:
    message: Callable[[str], str] = "held by {}".format
    first, second = Lock(tmp_path / "x.lock"), Lock(tmp_path / "x.lock")
    first.acquire(0, message)
    with pytest.raises(ResultsError, match=rf"held by process {os.getpid()} on \S+"):
        second.acquire(0, message)
    second.release()  # not its own
    with pytest.raises(ResultsError):
        second.acquire(0, message)
    first.release()
    assert os.listdir(tmp_path) == []
    second.acquire(0, message)
    second.release()
