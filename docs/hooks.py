"""What mkdocs does besides: one site of docs/site, docs/, and what is generated (mkdocs.yml names this file).

- The pages of docs/ and their pictures, and those of `BESIDE` are pages of the site too.
- Links are paths in the repository, so that they work there. Those to pages are mended; others lose the link.
- `<!-- include: README.md#Limits -->` is replaced by that section; `<!-- generated: NAME -->` by `GENERATED`.
- Formulas become MathML, which browsers draw without a script; nothing of a page may come from another host.
"""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import os
import posixpath
import re
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, OWN, RESULTS = ROOT / "docs", ROOT / "docs" / "site", ROOT / "benchmarks" / "results"
# Of the repository's root, where they are there.
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "lab/README.md", "tests/traps/README.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    sys.path.insert(0, str(ROOT / "src"))
    if (ROOT / "CHANGELOG.md").is_file():
        assert config.nav is not None
        config.nav[0]["Start"].append({"Change log": "CHANGELOG.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pictures = [*DOCS.glob("*.svg"), *DOCS.glob("pictures/*")]
    shown = dict.fromkeys([*DOCS.glob("*.md"), *pictures], DOCS)
    shown |= {ROOT / name: ROOT for name in BESIDE if (ROOT / name).is_file()}
    for path, folder in sorted(shown.items()):
        uri = path.relative_to(folder).as_posix()
        if files.get_file_from_path(uri) is not None:
            raise SystemExit(f"docs/hooks.py: {uri} is there twice: in docs/site, and as {path.relative_to(ROOT)}")
        files.append(File(uri, str(folder), config.site_dir, config.use_directory_urls))
    return files


# --- links and what is put in -----------------------------------------------------------------------------------------


def uri_of(path: Path) -> str | None:
    """The name in the site of a file of the repository."""
    if path == ROOT / "README.md":
        return "index.md"
    for folder in (OWN, DOCS):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name in BESIDE else None


_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")


def mended(markdown: str, source: Path, page: str) -> str:
    """Links of a file `source` of the repository, as the page of that name in the site needs them."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        uri = uri_of((source.parent / target).resolve())
        if uri is None:
            return text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def section(name: str, heading: str) -> str:
    """What stands below a heading of the second level, up to the next."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    if found is None:
        raise SystemExit(f"docs/hooks.py: {name} has no section {heading}")
    return found[1].strip()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    assert page.file.abs_src_path is not None
    text = mended(markdown, Path(page.file.abs_src_path), uri)
    text = re.sub(
        r"<!-- include: (\S+?)#(.+?) -->", lambda m: mended(section(m[1], m[2]), ROOT / m[1], uri), text
    )  # fmt: skip
    return re.sub(r"<!-- generated: (.+?) -->", lambda m: GENERATED[m[1]](), text)


def on_page_content(content: str, **_: Any) -> str:
    """`\\(…\\)` and `\\[…\\]`, as arithmatex leaves them → MathML."""

    def formula(found: re.Match[str]) -> str:
        tex, block = html.unescape(found[2]).strip(), found[1] == "["
        return convert(tex, display="block" if block else "inline")

    return re.sub(r"\\([(\[])(.*?)\\[)\]](?=</(?:span|div)>)", formula, content, flags=re.S)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    for remote in re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(https?:[^\"'> ]+)", output):
        logging.getLogger("mkdocs.hooks").warning("%s loads %s", page.file.src_uri, remote)  # an error, when strict
    return output


# --- what is generated ------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command's own help."""
    os.environ["COLUMNS"] = "98"
    from gemmnorm.cli.arguments import make_parser

    parser = make_parser()
    commands = next(action for action in parser._actions if isinstance(action.choices, dict)).choices
    parts = [f"```text\n{parser.format_help().rstrip()}\n```"]
    for name, command in (commands or {}).items():
        usage, _, options = command.format_help().partition(f"{command.description}\n\n")
        parts.append(f"## gemmnorm {name}\n\n{command.description}\n\n```text\n{usage}{options.rstrip()}\n```")
    return "\n\n".join(parts)


def readme_table() -> Any:
    """benchmarks/readme_table.py."""
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def figures() -> str:
    """The README's table, of the published result file."""
    text: str = readme_table().table(result("h100"), "h100")
    return re.sub(r"\[([^\]]+)\]\(benchmarks/[^)]*\)", r"`\1`", text.replace("<details>", '<details markdown="1">'))


def slower() -> str:
    """Where the faster of eager and torch.compile is ahead by more than 3%, among problems that nobody chose."""
    from gemmnorm.bench.random_problems import SLOWER, behind

    tool, document = readme_table(), result("h100-random")
    rows = [row for row in document["rows"] if row["chosen"] and row["compile_ms"]]
    ahead = sorted((row for row in rows if behind(row) > SLOWER), key=behind, reverse=True)
    lines = [
        f"| {row['batch']} × {row['in_features']} → {row['out_features']} | {tool.precision_of(row)} "
        f"| {tool.PHASES[row['phase']].lower()} | {tool.milliseconds(row['eager_ms'])} "
        f"| {tool.milliseconds(row['compile_ms'])} | {tool.milliseconds(row['ms'])} | {behind(row):.2f} |"
        for row in ahead
    ]
    head = "| sizes | precision | phase | eager, ms | torch.compile, ms | gemmnorm, ms | times the faster |\n"
    head += "|---|---|---|---|---|---|---|"
    machine = document["environment"]
    means = ", ".join(
        f"{geometric_mean(r['compile_ms'] / r['ms'] for r in rows if r['phase'] == phase):.2f} ({title.lower()})"
        for phase, title in tool.PHASES.items()
    )
    told = f"These are {len(ahead)} of {len(rows)} cells. The geometric mean of torch.compile's time over "
    told += f"gemmnorm's, over all: {means}."
    source = f"{machine['gpu']}, torch {machine['torch']}, `{document['command']}`.{tool.since(document)}"
    return "\n".join([head, *lines, "", f"{told} {source}"])


def models() -> str:
    """Whole models: milliseconds of a step on the device and of wall clock, and the memory that it takes."""
    tool, document = readme_table(), result("h200-models")
    found = {(row["model"], row["way"]): row for row in document["rows"]}
    ways = ("eager", "compiled", "fused", "fused and compiled")
    lines = [
        "| model | " + " | ".join(f"{way}" for way in ways) + " | peak, eager | fused |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(model for model, _ in found):
        rows = [found.get((name, way)) for way in ways]
        eager, fused = found[name, "eager"], found[name, "fused"]
        times = ["–" if row is None else f"{row['device_ms']:.3g} · {row['wall_ms']:.3g}" for row in rows]
        peaks = [f"{row['peak_mb']:,.0f}" for row in (eager, fused)]
        lines.append(f"| {name}: {eager['batch']}, {eager['dtype']} | {' | '.join([*times, *peaks])} |")
    machine = document["environment"]
    return "\n".join(
        [*lines, "", f"{machine['gpu']}, torch {machine['torch']}, `{document['command']}`.{tool.since(document)}"]
    )


def activation_names() -> str:
    """The names of the table of activations, with their parameters' defaults and PyTorch's modules."""
    from gemmnorm import activations

    lines = ["| name | module |", "|---|---|"]
    for row in activations.TABLE:
        defaults = ", ".join(f"{value:g}" for _, value in row.parameters)
        settings = ", ".join(f'{key}="{value}"' for key, value in row.matches)
        name = f"{row.name}({defaults})" if defaults else row.name
        lines.append(f"| `{name}` | `nn.{row.module.__name__}({settings})` |")
    return "\n".join(lines)


GENERATED = {
    "activations": activation_names,
    "command line": command_line,
    "figures": figures,
    "models": models,
    "slower": slower,
}
