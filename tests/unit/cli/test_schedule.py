"""`farloop lab schedule`: the rounds before the run, as JSON and drawn. Its table: tests/unit/docs/test_outputs.py."""

import math
from pathlib import Path
from typing import Any

import pytest
from command_line import farloop, found


def setting(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"run.{name}={value}")]


QSR = setting(steps=1000, warmup_steps=50, lr=0.008, min_lr=1e-6, h=4, h_rule="qsr", h_alpha=0.0175)


def plain(*words: str) -> Any:
    return found("lab", "schedule", *words)


def test_the_rounds_cover_the_run_and_follow_the_learning_rate_at_their_start() -> None:
    made = plain(*QSR)
    rounds = made["rounds"]
    assert sum(rounds) == made["steps"] == 1000 and made["longest_round"] == max(rounds)
    assert made["syncs"] == len(rounds) < 250 and made["comm_percent"] == pytest.approx(100 * len(rounds) / 1000)
    assert made["starts"] == [sum(rounds[:index]) for index in range(len(rounds))]
    for start, length, rate in list(zip(made["starts"], rounds, made["learning_rates"], strict=True))[:-1]:
        assert length == (4 if start < 50 else max(4, math.floor((0.0175 / rate) ** 2)))
    bounded = plain(*QSR, *setting(h_max=50, h_init=5))
    assert bounded["rounds"][:10] == [5] * 10 and bounded["longest_round"] == 50
    constant = plain(*setting(steps=100, h=30))
    assert (constant["rounds"], constant["rule"], constant["alpha"]) == ([30, 30, 30, 10], "constant", None)


@pytest.mark.parametrize(
    ("settings", "share"),
    [({"min_lr": 0}, 3 / 8), ({"min_lr": 0.0008}, 0.404), ({"schedule": "linear", "min_lr": 0}, 1 / 3)],
)
def test_a_cosine_and_a_line_save_the_share_that_is_known(settings: dict[str, Any], share: float) -> None:
    """Where (α/η_max)² = H_base, the syncs beside a constant H are the mean of (η/η_max)²."""
    run = setting(steps=40000, warmup_steps=0, lr=0.008, h_rule="qsr", **settings)
    for h, root, error in ((4, 2, 0.01 + 1 / 8), (100, 10, 0.05)):
        made = plain(*run, *setting(h=h, h_alpha=0.008 * root))
        assert made["syncs"] / (40_000 / h) == pytest.approx(share, rel=error)


def test_a_run_file_is_previewed_and_settings_override_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    run = "[run]\nmethod = 'streaming'\nsteps = 900\nh = 20\nh_rule = 'qsr'\nh_alpha = 0.009\n"
    path.write_text(f"{run}[coordinator]\nstate_dir = 's'\n")
    made = plain(str(path))
    assert (made["steps"], made["h_base"], made["rule"]) == (900, 20, "qsr") and made["syncs"] < 45
    assert plain(str(path), *setting(h_rule="linear", h_alpha=0.04))["rule"] == "linear"
    assert plain(str(path), "--set", "run.steps=400")["steps"] == 400
    assert list(tmp_path.iterdir()) == [path], "nothing is started"
    drops = setting(schedule="step", drops="200,400", h_rule="qsr", h_alpha=0.011)
    assert sorted(set(plain(*drops)["learning_rates"][4:])) == pytest.approx([2e-4, 2e-3])
    again = plain(*QSR, "--set", "run.rewarms=500:0.008")
    assert again["rounds"][again["starts"].index(500)] == 4


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_it_is_drawn(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "plots" / f"h.{kind}"
    told = farloop("lab", "schedule", *QSR, "--plot", str(path)).stdout
    assert "corrected for the work of a round" in told and path.stat().st_size > 5000
    if kind == "svg":
        assert all(word in path.read_text() for word in ("qsr", "learning rate", "inner step"))
