"""`farloop data`: builds a token file, shows it, and refuses to lose one."""

import json
from pathlib import Path

import pytest
from command_line import error_line, farloop, found

from farloop.node.data.token_file import open_tokens


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"line {number} of the corpus"}) for number in range(50)]
    Path("corpus.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_file_is_built_shown_and_verified() -> None:
    told = found("data", "build", "corpus.jsonl", "--out", "tokens.bin")
    header = open_tokens(Path("tokens.bin")).header
    assert told["digest"] == header.digest and told["documents"] == 50 and told["tokenizer_file"] is None
    assert told["skipped"] == 0 and told["characters"] == header.tokens - 50
    shown = found("data", "show", "tokens.bin", "--verify")
    assert shown == {key: told[key] for key in shown} and shown["bytes"] == Path("tokens.bin").stat().st_size
    text = farloop("data", "show", "tokens.bin").stdout
    assert f"digest       {header.digest}" in text and f"tokens       {header.tokens:,} as uint8, " in text
    data = bytearray(Path("tokens.bin").read_bytes())
    data[5000] ^= 1
    Path("tokens.bin").write_bytes(data)
    assert "tokens.bin does not have the digest of its header" in error_line("data", "show", "tokens.bin", "--verify")


def test_a_tokenizer_is_trained_beside_the_file_and_can_be_used_again() -> None:
    told = found("data", "build", "corpus.jsonl", "--train-tokenizer", "280", "--out", "tokens.bin")
    assert told["tokenizer_file"] == "tokens.tokenizer.json" and (told["vocabulary"], told["dtype"]) == (280, "uint16")
    again = found("data", "build", "corpus.jsonl", "--tokenizer", "tokens.tokenizer.json", "--out", "again.bin")
    assert again["digest"] == told["digest"]
    text = farloop("data", "build", "corpus.jsonl", "--tokenizer", "tokens.tokenizer.json", "--out", "more.bin").stdout
    assert "tokenizer    tokens.tokenizer.json" in text and "characters per token" in text


def test_nothing_is_replaced_without_force() -> None:
    Path("tokens.bin").write_text("mine")
    build = ("data", "build", "corpus.jsonl", "--out", "tokens.bin")
    assert error_line(*build) == "tokens.bin exists: give another --out, or --force to replace it"
    assert Path("tokens.bin").read_text() == "mine"
    assert found(*build, "--force")["documents"] == 50
    Path("tokens.tokenizer.json").write_text("{}")
    line = error_line("data", "build", "corpus.jsonl", "--out", "tokens.x", "--train-tokenizer", "300")
    assert line.startswith("tokens.tokenizer.json exists: ") and line.endswith("--tokenizer tokens.tokenizer.json")
    Path("folder").mkdir()
    for path in ("folder", "."):
        assert error_line("data", "build", "corpus.jsonl", "--out", path, "--force").startswith(f"{path} exists: ")


def test_what_cannot_be_built_is_said_in_one_line_and_leaves_nothing(folder: Path) -> None:
    with Path("corpus.jsonl").open("a") as file:
        file.write('\n{"txt": "x"}\n')
    before = sorted(folder.iterdir())
    words = "corpus.jsonl, line 51: there is no field 'text'; there are 'txt' (--skip-bad leaves such out)"
    assert error_line("data", "build", "corpus.jsonl", "--out", "tokens.bin") == words
    line = error_line("data", "build", "corpus.jsonl", "--out", "corpus.jsonl/t.bin")
    assert line.startswith("cannot write corpus.jsonl/t.bin: corpus.jsonl is a file, not a folder")
    one = ("data", "build", "corpus.jsonl", "--out", "t.bin")
    assert error_line(*one, "--tokenizer", "t", "--train-tokenizer", "300").startswith("--tokenizer and --train-token")
    assert error_line(*one, "--end-token", "</s>") == "--end-token is a token of --tokenizer, which is missing"
    assert error_line(*one, "--tokenizer", "t.json") == "cannot read t.json: no such file or directory"
    assert (
        error_line("data", "show", "corpus.jsonl") == "corpus.jsonl is no token file: make it with farloop data build"
    )
    assert sorted(folder.iterdir()) == before
    told = found("data", "build", "corpus.jsonl", "--skip-bad", "--out", "tokens.bin")
    assert (told["documents"], told["skipped"]) == (50, 1)
