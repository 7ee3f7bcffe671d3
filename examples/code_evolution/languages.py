"""Tells the language of a file by its name; none for files that people did not write by hand."""

from pathlib import PurePosixPath

_EXTENSIONS_OF = {
    "C": "c",
    "C/C++ header": "h hh hpp hxx",
    "C#": "cs",
    "C++": "cc cpp cxx c++",
    "CMake": "cmake",
    "CSS": "css less sass scss",
    "Dart": "dart",
    "Elixir": "ex exs",
    "Go": "go",
    "Groovy": "groovy gradle",
    "Haskell": "hs lhs",
    "HCL": "hcl tf",
    "HTML": "html htm xhtml",
    "Java": "java",
    "JavaScript": "js mjs cjs jsx",
    "JSON": "json json5 jsonc",
    "Jupyter": "ipynb",
    "Kotlin": "kt kts",
    "Lua": "lua",
    "Makefile": "mk mak",
    "Markdown": "md markdown",
    "Objective-C": "m mm",
    "Perl": "pl pm",
    "PHP": "php",
    "PowerShell": "ps1 psm1",
    "Protocol Buffers": "proto",
    "Python": "py pyi pyx",
    "R": "r rmd",
    "reStructuredText": "rst",
    "Ruby": "rb rake gemspec",
    "Rust": "rs",
    "Scala": "scala sc",
    "Shell": "sh bash zsh fish",
    "SQL": "sql",
    "Swift": "swift",
    "TeX": "tex sty bib",
    "TOML": "toml",
    "TypeScript": "ts tsx mts cts",
    "Vue": "vue",
    "XML": "xml xsd xsl xslt",
    "YAML": "yaml yml",
    "Zig": "zig",
}
_LANGUAGE_OF = {
    ending: language for language, endings in _EXTENSIONS_OF.items() for ending in endings.split()
}
_LANGUAGE_OF_NAME = {
    ".bashrc": "Shell",
    "cmakelists.txt": "CMake",
    "dockerfile": "Dockerfile",
    "gemfile": "Ruby",
    "jenkinsfile": "Groovy",
    "makefile": "Makefile",
    "rakefile": "Ruby",
}
_VENDORED = {
    ".venv",
    "_vendor",
    "node_modules",
    "site-packages",
    "third-party",
    "third_party",
    "vendor",
    "venv",
}
_GENERATED_NAMES = {"composer.lock", "npm-shrinkwrap.json", "package-lock.json", "pnpm-lock.yaml"}
_GENERATED_ENDINGS = (
    ".min.js",
    ".min.css",
    ".pb.go",
    ".pb.cc",
    ".pb.h",
    "_pb2.py",
    "_pb2.pyi",
    "_pb2_grpc.py",
)


def language_of(path: str) -> str | None:
    """Return the language of a file, given its path inside the repository, with slashes.

    None for unknown and binary kinds, and for vendored and generated files.
    """
    *folders, name = path.lower().split("/")
    if not _VENDORED.isdisjoint(folders) or name in _GENERATED_NAMES or name.endswith(_GENERATED_ENDINGS):
        return None
    if name in _LANGUAGE_OF_NAME:
        return _LANGUAGE_OF_NAME[name]
    if name.startswith("dockerfile."):
        return "Dockerfile"
    return _LANGUAGE_OF.get(PurePosixPath(name).suffix.removeprefix("."))
