"""Coordinator: windows, journal and disk, and what it refused."""

from pathlib import Path

from farloop.monitoring.dashboards.panels import GOOD_IF_HIGH, GOOD_IF_ZERO, HAPPENED, C, Line, Page, some

RUNBOOKS = Path(__file__).parents[1] / "runbooks"


def runbooks() -> str:
    """Every alert with what it means and where its page is, as Markdown."""
    rows = ["| Alert | Meaning | Page |", "| --- | --- | --- |"]
    for path in sorted(RUNBOOKS.glob("*.md")):
        meaning = path.read_text().partition("## Meaning\n\n")[2].partition("\n")[0]
        first = meaning.split(". ")[0].rstrip(".")
        rows.append(f"| **{path.stem}** | {first}. | `monitoring/runbooks/{path.name}` |")
    return "\n".join(rows)


def quantile(share: float, metric: str, by: str = "") -> str:
    """Of a histogram, over the last five minutes; `by`: labels that stay, each with a comma before it."""
    return f"histogram_quantile({share:g}, sum by (le{by}) (rate({metric}_bucket{C}[5m])))"


def coordinator() -> Page:
    """The one process that must not lose anything."""
    page = Page(
        title="farloop / Coordinator",
        uid="farloop-coordinator",
        about="The process that holds the global model: its windows, journal, disk and alarms, and whom it refused.",
        annotations=HAPPENED,
    )
    page.number(
        "Alarms",
        f"sum(farloop_alarms{C})",
        "none",
        "Of the coordinator itself; /status says which and what to do.",
        steps=GOOD_IF_ZERO,
        decimals=0,
    )
    page.number(
        "Commits held",
        'max({__name__=~"farloop_(storage|participation|history)_held",instance=~"$coordinator"})',
        "bool_yes_no",
        "Whether nothing is committed: the disk takes no more, too few nodes are merged, or the state looks old.",
        steps=GOOD_IF_ZERO,
        graph=False,
    )
    page.number(
        "Participation",
        f"min(farloop_participation_ratio{C})",
        "percentunit",
        "Share of the live nodes that were merged in the last rounds.",
        steps=GOOD_IF_HIGH,
        decimals=0,
    )
    page.number(
        "Start",
        f"max(farloop_epoch{C})",
        "none",
        "Which start of the coordinator over this state this is.",
        decimals=0,
        graph=False,
    )
    page.number(
        "Running for",
        f"time() - max(process_start_time_seconds{C})",
        "s",
        "Since its process started.",
        graph=False,
    )
    page.number(
        "Free disk",
        f"min(farloop_storage_free_bytes{C} / farloop_storage_size_bytes{C})",
        "percentunit",
        "Of the file system of the state folder. When it is full the run is held, and loses nothing.",
        steps=((None, "red"), (0.1, "orange"), (0.2, "green")),
        decimals=0,
    )

    page.row("Windows")
    page.graph(
        "Committed, by the minute",
        [Line(f"sum(rate(farloop_commits_total{C}[1m])) * 60", "windows")],
        "none",
        "All fragments together.",
        width=8,
    )
    page.graph(
        "Open for",
        [
            Line(
                quantile(0.5, "farloop_window_seconds", ", phase").replace("_bucket{", '_bucket{phase="collecting",'),
                "half of them",
            ),
            Line(
                quantile(0.95, "farloop_window_seconds", ", phase").replace("_bucket{", '_bucket{phase="collecting",'),
                "19 of 20",
            ),
        ],
        "s",
        "From the opening of a window to the end of collecting.",
        width=8,
    )
    page.graph(
        "Version of each fragment",
        [Line(f"max by (fragment) (farloop_fragment_version{C})", "fragment {{fragment}}")],
        "none",
        "They climb together; one that stays behind waits for a delta.",
        held=True,
        width=8,
        low=None,
    )

    page.row("What a commit takes")
    page.graph(
        "Merging",
        [
            Line(quantile(0.5, "farloop_merge_seconds"), "half of them"),
            Line(quantile(0.95, "farloop_merge_seconds"), "19 of 20"),
        ],
        "s",
        "Summing, the outer step and encoding of one window.",
        width=8,
    )
    page.graph(
        "Journal",
        [
            Line(quantile(0.5, "farloop_journal_seconds"), "half of them"),
            Line(quantile(0.95, "farloop_journal_seconds"), "19 of 20"),
        ],
        "s",
        "Making one commit durable: two fsyncs. Nobody hears of a commit before.",
        width=8,
        steps=((None, "transparent"), (1, "red")),
    )
    page.graph(
        "Samples",
        [Line(f"sum by (fate) (rate(farloop_samples_total{C}[1m]))", "{{fate}}")],
        "none",
        "By the second: granted to nodes, trained on, given back; uncertain: trained on, in no stored delta.",
        width=8,
    )

    page.row("What it refused, dropped and lost")
    page.graph(
        "Happenings",
        [
            Line(
                some(f"sum by (kind, reason) (farloop_happenings_total{C}) > 0", "kind"),
                "{{kind}} {{reason}}",
            )
        ],
        "none",
        "Since its start. delta: refused; dropped: a window closed without it; session: a connection ended; "
        "left; anchor: it did not match its digest.",
        width=8,
        held=True,
        counts=True,
    )
    page.graph(
        "Not let in",
        [
            Line(some(f"sum by (reason) (farloop_refusals_total{C}) > 0", "reason"), "refused: {{reason}}"),
            Line(
                some(f"sum by (reason) (farloop_turned_away_total{C}) > 0", "reason"),
                "not heard: {{reason}}",
            ),
        ],
        "none",
        "Since its start. Refused: a node that greeted; not heard: an unknown key, a broken frame, a flood.",
        width=8,
        held=True,
        counts=True,
    )
    page.graph(
        "Alarms and alerts",
        [
            Line(some(f"sum by (kind) (farloop_alarm{C}) > 0", "kind"), "alarm: {{kind}}"),
            Line(
                some('sum by (alertname) (ALERTS{alertname=~"Farloop.*",alertstate="firing"})', "alertname"),
                "alert: {{alertname}}",
            ),
        ],
        "none",
        "Alarms are the coordinator's own words, alerts are rules of Prometheus; each alert has a runbook.",
        held=True,
        width=8,
        counts=True,
    )

    page.row("Its machine")
    page.graph(
        "Disk",
        [
            Line(f"min(farloop_storage_free_bytes{C})", "free"),
            Line(f"min(farloop_storage_size_bytes{C})", "size"),
        ],
        "bytes",
        "Of the file system of the state folder.",
        width=8,
    )
    page.graph(
        "Memory and processor",
        [
            Line(f"max(process_resident_memory_bytes{C})", "resident"),
            Line(f"max(rate(process_cpu_seconds_total{C}[1m]))", "cores in use", axis="right", unit="none"),
        ],
        "bytes",
        "Of its process. Anchors, momenta and the deltas of open windows are in memory.",
        width=8,
    )
    page.graph(
        "Copies and reports",
        [
            Line(f"max(farloop_copy_lag_seconds{C})", "age of the newest copy"),
            Line(
                f"sum(increase(farloop_dropped_timeline_lines_total{C}[5m]))", "lines lost", axis="right", unit="none"
            ),
        ],
        "s",
        "Copies of the state to an object store, where that is set; lines of metrics.jsonl that the disk did not "
        "take in the last five minutes.",
        width=8,
    )

    page.row("If an alert fires")
    page.words("Runbooks", runbooks(), height=18)
    return page
