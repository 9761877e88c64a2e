"""Requests to the coordinator of a state directory through its admin socket."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farloop.algo.revisions import check_keys
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.coordinator.admin import NAME, ask, over
from farloop.monitoring.status import finished_status

TIMEOUT_S = 60.0  # time limit for an answer, which comes once the change is durable


def change_terms(words: Sequence[str], state: Path, *, dry_run: bool) -> Mapping[str, Any]:
    """Request a change of terms, and return the answer.
    Raises CommandError: invalid words, no coordinator, or a refusal; one line each."""
    given = _given(words)
    try:
        check_keys(given.keys() - {"codec"})  # both codecs at once, which the coordinator knows
    except ValueError as error:
        raise CommandError(str(error)) from error
    return asked({"do": "set", "given": given, "dry_run": dry_run}, state)


def asked(request: Mapping[str, Any], state: Path) -> Mapping[str, Any]:
    """The coordinator's answer to a request. Raises CommandError, NoFolder."""
    from farloop.coordinator.storage.files import state_folder

    state_folder(state)
    try:
        answer = ask(state, request, TIMEOUT_S)
    except TimeoutError as error:
        raise CommandError(
            f"no answer from {state / NAME} within {TIMEOUT_S:g} s: farloop status says whether its disk is full",
            ExitCode.UNREACHABLE,
        ) from error
    except (ValueError, OSError) as error:
        if ended := finished_status(state):
            name, steps = ended["run"]["name"], ended["run"]["steps"]
            none_left = f"run {name} is finished after {steps} steps: it waits for no node and misses none"
            told = over(name, steps, state) if request["do"] == "set" else none_left
            raise CommandError(told, ExitCode.REFUSED) from error
        if isinstance(error, ValueError):
            raise CommandError(f"the coordinator on {state} does not answer: {error}", ExitCode.UNREACHABLE) from error
        what = (error.strerror or str(error)).lower()
        raise CommandError(
            f"no coordinator at {state / NAME}: {what}; is one running on this folder?", ExitCode.UNREACHABLE
        ) from error
    if "error" in answer:
        raise CommandError(str(answer["error"]), ExitCode.REFUSED if answer.get("not_now", True) else ExitCode.USAGE)
    return answer


def _given(words: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise CommandError(f"{word!r} is not KEY=VALUE, as outer_lr=0.5")
        if key.strip() in given:
            raise CommandError(f"{key.strip()} is set twice")
        given[key.strip()] = text
    return given
