import pytest

from code_evolution.languages import language_of


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("main.py", "Python"),
        ("deep/er/MAIN.PY", "Python"),
        ("a.b.c.ts", "TypeScript"),
        ("include/x.h", "C/C++ header"),
        ("x.C++", "C++"),
        ("Makefile", "Makefile"),
        ("sub/Dockerfile", "Dockerfile"),
        ("Dockerfile.dev", "Dockerfile"),
        ("CMakeLists.txt", "CMake"),
        (".bashrc", "Shell"),
        ("two\nlines.go", "Go"),
        ("ünï.rs", "Rust"),
        ("package.json", "JSON"),
    ],
)
def test_knows_languages_by_name(path: str, language: str) -> None:
    assert language_of(path) == language


@pytest.mark.parametrize(
    "path",
    [
        "README",
        "",
        "image.png",
        "noext.",
        ".py",
        "py",
        "build",
        "a.py/",
        "node_modules/left/pad.js",
        "src/vendor/x.go",
        "third_party/x.c",
        "static/app.min.js",
        "api/v1/service.pb.go",
        "proto/service_pb2.py",
        "package-lock.json",
        "web/Package-Lock.json",
    ],
)
def test_leaves_out_unknown_vendored_and_generated_files(path: str) -> None:
    assert language_of(path) is None


def test_a_file_named_like_a_vendored_folder_counts() -> None:
    assert language_of("vendor.go") == "Go"
    assert language_of("src/node_modules.js") == "JavaScript"
