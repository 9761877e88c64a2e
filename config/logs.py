"""Log lines on standard error: `key=value`, or one JSON object per line; and output for terminals without Unicode.

All messages of farloop have the form `event key=value …`, and a sentence may follow; the pairs are parsed here.
"""

import ast
import codecs
import io
import logging
import re
import sys
import unicodedata
from datetime import UTC, datetime
from enum import StrEnum

from farloop.monitoring.status import dumps
from farloop.runtime.log_queue import LogQueue

_PAIR = re.compile(r"""(?:^|\s+)([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\S*)""")
_END = re.compile(r"(?<!:)[:;,]$")  # of a value that a sentence follows; `::` is an address
_PLAIN = re.compile(r"[^\s\"'=]*[^\s\"'=:]")


class LogLevel(StrEnum):
    """As in `--log-level`."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up(level: LogLevel, *, json_lines: bool = False, rank: int = 0) -> None:
    """Send all logs of this process to standard error; of ranks other than 0 warnings only. Nothing waits for it."""
    handler = LogQueue(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else KeyValueLines())
    threshold = getattr(logging, level.upper())
    logging.basicConfig(level=max(threshold, logging.WARNING) if rank else threshold, handlers=[handler], force=True)
    logging.captureWarnings(True)  # they would be written at once


def pairs_of(message: str) -> dict[str, str]:
    """The event and its fields: `commit fragment=0 why='all came'` → event, fragment, why. What follows the pairs, as
    in `not saved fragment=1: no room; tried again`, is the field `detail`, whatever it contains: a colon ends the
    pairs, so that the text of an error adds no fields."""
    found = _PAIR.search(message)
    event = message[: found.start()].rstrip(" :") if found else message
    fields, end, last = {"event": event} if event else {}, len(message), ""
    while found:
        last, end = found[1], found.end()
        fields[last] = _unquoted(found[2])
        found = None if re.search(r"(?<!:):$", found[2]) else _PAIR.match(message, end)
    if rest := message[end:].strip(" :;,\n"):
        fields[last] = _END.sub("", fields[last])
        fields["detail"] = f"{fields['detail']}; {rest}" if "detail" in fields else rest
    return fields


class KeyValueLines(logging.Formatter):
    """`ts=… level=info at=coordinator.observe.observer event=commit fragment=0 …`"""

    def format(self, record: logging.LogRecord) -> str:
        quoted = {k: v if _PLAIN.fullmatch(v) else dumps(v, ensure_ascii=False) for k, v in _fields(record).items()}
        line = " ".join(f"{key}={value}" for key, value in quoted.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return dumps(fields, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, str]:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    where = record.name.removeprefix("farloop.")
    return {"ts": at, "level": record.levelname.lower(), "at": where} | pairs_of(record.getMessage())


def _unquoted(text: str) -> str:
    """`%r` of a text as the text."""
    if text[:1] not in ("'", '"') or text[-1:] != text[:1] or len(text) < 2:
        return text
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


# --- Terminals without Unicode

_ASCII = dict(zip("−–—…·×÷⌊⌋⌈⌉●○✓▲▼▁▂▃▄▅▆▇█│─", "---.-x/[][]*o+^v_.-=+*##|-", strict=True))
_ASCII |= {"→": "->", "←": "<-", "√": "sqrt ", "∞": "inf", "≤": "<=", "≥": ">=", "±": "+-"}


def print_anywhere() -> None:
    """What the encoding of standard output cannot say, as that of an ASCII or Latin-1 terminal, is written in ASCII."""
    codecs.register_error("farloop", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors="farloop")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii_of, error.object[error.start : error.end])), error.end


def _ascii_of(character: str) -> str:
    name = unicodedata.name(character, "")
    if name.startswith("GREEK "):
        return name.rpartition(" ")[2].lower()
    like = unicodedata.normalize("NFKD", character).replace("⁄", "/").encode("ascii", "ignore").decode()
    return _ASCII.get(character) or ("^" if name.startswith("SUPERSCRIPT ") else "") + like or "?"
