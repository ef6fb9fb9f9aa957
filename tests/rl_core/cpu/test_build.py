"""Compiled code: built once, from these sources, for this machine; and what happens if nothing can be compiled."""

import logging
import subprocess
import sys

import pytest

from rl_core.cpu import build

needs_compiler = pytest.mark.skipif(build.load_library() is None, reason="needs a C compiler")


@pytest.mark.slow
@needs_compiler
def test_threads_are_those_of_torch():
    """A second OpenMP library would have its own threads, which wait while torch's want to work."""
    program = (
        "from rl_core.cpu import build; build.load_library();"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libiomp' in line}"
        " == {build.find_loaded_openmp()})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["True"]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Simulate a process that has compiled nothing yet; the sources are two small files, because the real ones take
    seconds.
    """
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    monkeypatch.setattr(build, "_FOLDER", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load_library.cache_clear()
    yield tmp_path / "cache/posttrain"
    build.load_library.cache_clear()


@needs_compiler
def test_it_is_compiled_once(fresh, monkeypatch, tmp_path):
    assert build.load_library().answer() == 42
    (library,) = fresh.iterdir()
    modified_at = library.stat().st_mtime_ns
    build.load_library.cache_clear()
    assert build.load_library() is not None
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [modified_at]
    had_threads = build.find_loaded_openmp() is not None
    (tmp_path / "sources/answer.h").write_text("#define ANSWER 43\n")
    build.load_library.cache_clear()
    assert build.load_library().answer() == 43
    assert len(list(fresh.glob("*.so"))) == 2
    # without threads it is another library
    monkeypatch.setattr(build, "find_loaded_openmp", lambda: None)
    build.load_library.cache_clear()
    assert build.load_library() is not None
    assert len(list(fresh.glob("*.so"))) == (3 if had_threads else 2)


@needs_compiler
def test_an_unwritable_cache_is_no_problem(fresh, monkeypatch, tmp_path):
    """Neither an unwritable cache nor a missing home directory; the library is then deleted once loaded."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "temporary"))
    fresh.parent.write_text("a file where the folder should be")
    compiled = build.load_library()
    assert compiled is not None
    monkeypatch.delenv("XDG_CACHE_HOME")

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", fail)
    build.load_library.cache_clear()
    assert build.load_library() is not compiled is not None
    assert list((tmp_path / "temporary").iterdir()) == []
    assert compiled.answer() == 42


def test_without_a_compiler_torch_does_it(fresh, monkeypatch, caplog):
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert build.load_library() is None and not caplog.records
    monkeypatch.delenv("POSTTRAIN_NATIVE")
    for compiler in ("false", "no-such-compiler-here"):
        build.load_library.cache_clear()
        caplog.clear()
        monkeypatch.setenv("CC", compiler)
        with caplog.at_level(logging.WARNING):
            assert build.load_library() is None
        assert f"{compiler} could not compile the code in" in caplog.text
    build.load_library.cache_clear()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert build.load_library() is None
    assert "no C compiler" in caplog.text
