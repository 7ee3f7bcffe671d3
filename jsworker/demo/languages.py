"""Which language a file is written in, judged by its name; none for what people did not write by hand."""

from pathlib import PurePosixPath

_EXTENSIONS_OF = {
    "Ada": "adb ads",
    "Assembly": "asm s nasm",
    "Batch": "bat cmd",
    "C": "c",
    "C/C++ header": "h hh hpp hxx",
    "C#": "cs csx",
    "C++": "cc cpp cxx c++ ipp tpp",
    "Clojure": "clj cljs cljc edn",
    "CMake": "cmake",
    "COBOL": "cob cbl",
    "CoffeeScript": "coffee",
    "Crystal": "cr",
    "CSS": "css",
    "CUDA": "cu cuh",
    "Cython": "pyx pxd pxi",
    "D": "d di",
    "Dart": "dart",
    "Elixir": "ex exs",
    "Elm": "elm",
    "Emacs Lisp": "el",
    "Erlang": "erl hrl",
    "F#": "fs fsi fsx",
    "Fortran": "f f77 f90 f95 f03 f08 for",
    "Go": "go",
    "GraphQL": "graphql gql",
    "Groovy": "groovy gradle",
    "Haskell": "hs lhs",
    "HCL": "hcl tf tfvars",
    "HTML": "html htm xhtml",
    "Java": "java",
    "JavaScript": "js mjs cjs jsx",
    "JSON": "json json5 jsonc",
    "Julia": "jl",
    "Jupyter": "ipynb",
    "Kotlin": "kt kts",
    "Less": "less",
    "Lisp": "lisp lsp cl",
    "Lua": "lua",
    "M4": "m4 ac",
    "Makefile": "mk mak",
    "Markdown": "md markdown mdx",
    "Nim": "nim nims",
    "Nix": "nix",
    "Objective-C": "m mm",
    "OCaml": "ml mli mll mly",
    "Pascal": "pas pp dpr",
    "Perl": "pl pm pod",
    "PHP": "php phtml",
    "PowerShell": "ps1 psm1 psd1",
    "Prolog": "pro prolog",
    "Protocol Buffers": "proto",
    "Python": "py pyi pyw",
    "R": "r rmd",
    "reStructuredText": "rst",
    "Ruby": "rb rake gemspec ru",
    "Rust": "rs",
    "Sass": "sass scss",
    "Scala": "scala sc sbt",
    "Scheme": "scm ss rkt",
    "Shell": "sh bash zsh fish ksh",
    "Solidity": "sol",
    "SQL": "sql",
    "Starlark": "bzl star",
    "Svelte": "svelte",
    "Swift": "swift",
    "Tcl": "tcl tk",
    "TeX": "tex sty cls bib",
    "TOML": "toml",
    "TypeScript": "ts tsx mts cts",
    "Vala": "vala vapi",
    "Verilog": "v vh sv svh",
    "VHDL": "vhd vhdl",
    "Vim script": "vim",
    "Visual Basic": "vb vbs bas",
    "Vue": "vue",
    "XML": "xml xsd xsl xslt",
    "YAML": "yaml yml",
    "Zig": "zig",
}
_BY_EXTENSION = {
    ending: language for language, endings in _EXTENSIONS_OF.items() for ending in endings.split()
}

_BY_NAME = {
    ".bash_profile": "Shell",
    ".bashrc": "Shell",
    ".profile": "Shell",
    ".vimrc": "Vim script",
    ".zshrc": "Shell",
    "build.bazel": "Starlark",
    "cmakelists.txt": "CMake",
    "containerfile": "Dockerfile",
    "dockerfile": "Dockerfile",
    "gemfile": "Ruby",
    "gnumakefile": "Makefile",
    "jenkinsfile": "Groovy",
    "justfile": "Just",
    "makefile": "Makefile",
    "makefile.am": "Makefile",
    "makefile.in": "Makefile",
    "meson.build": "Meson",
    "rakefile": "Ruby",
    "sconscript": "Python",
    "sconstruct": "Python",
    "vagrantfile": "Ruby",
}

_VENDORED = frozenset(
    {
        ".tox",
        ".venv",
        ".yarn",
        "__pycache__",
        "_vendor",
        "bower_components",
        "carthage",
        "node_modules",
        "pods",
        "site-packages",
        "third-party",
        "third_party",
        "thirdparty",
        "vendor",
        "vendored",
        "venv",
    }
)
_GENERATED_NAMES = frozenset(
    {
        "aclocal.m4",
        "composer.lock",
        "npm-shrinkwrap.json",
        "package-lock.json",
        "packages.lock.json",
        "pnpm-lock.yaml",
    }
)
_GENERATED_ENDINGS = (
    ".min.js",
    ".min.css",
    ".bundle.js",
    ".pb.go",
    ".pb.cc",
    ".pb.h",
    "_pb2.py",
    "_pb2.pyi",
    "_pb2_grpc.py",
    ".g.dart",
    ".freezed.dart",
    ".designer.cs",
    ".generated.ts",
)


def language_of(path: str) -> str | None:
    """Return the language of a file.

    Args:
        path: its path inside the repository, with slashes.

    Returns:
        The language's name; None for unknown and binary kinds, and for vendored and generated files.
    """
    *folders, name = path.lower().split("/")
    if not _VENDORED.isdisjoint(folders) or name in _GENERATED_NAMES or name.endswith(_GENERATED_ENDINGS):
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("dockerfile."):
        return "Dockerfile"
    return _BY_EXTENSION.get(PurePosixPath(name).suffix.removeprefix("."))
