"""Kinds of panels of the Grafana dashboards, and how a dashboard is built from a table of them.

In expressions `{C}` and the like stand for a selector of `SELECTORS`. Needs grafana-foundation-sdk, which knows the
fields that Grafana has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

SELECTORS = {
    "{C}": '{instance=~"$coordinator"}',  # series of the chosen coordinators
    "{CN}": '{instance=~"$coordinator",node=~"$node"}',  # what they report of the chosen nodes
    "{N}": '{node=~"$node"}',  # the chosen nodes' own pages
    "{G}": '{Hostname=~"$gpu_host"}',  # NVIDIA's exporter on the chosen hosts
    "{collecting}": '{phase="collecting",instance=~"$coordinator"}',
    "{sent}": '{instance=~"$coordinator",direction="sent"}',
    "{received}": '{instance=~"$coordinator",direction="received"}',
}

ANNOTATIONS = (
    ("Coordinator restarted", "changes(farloop_epoch{C}[1m]) > 0", "red"),
    ("Node restarted", "changes(farloop_node_incarnation{C}[1m]) > 0", "orange"),
    ("H changed", "changes(farloop_h_steps{C}[1m]) > 0", "blue"),
)
"""Name, expression that is above zero where something happened, colour."""

WIDTH = 24  # columns of a dashboard
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Steps = Sequence[tuple[float | None, str]]  # thresholds: from this value on this colour; the first from None
GOOD_IF_HIGH: Steps = ((None, "red"), (0.6, "orange"), (0.85, "green"))  # for shares of which 1 is best
GOOD_IF_ZERO: Steps = ((None, "green"), (1, "red"))
CONNECTED: Steps = ((None, "red"), (1, "green"))
NEUTRAL: Steps = ((None, "blue"),)


@dataclass(frozen=True, slots=True)
class Line:
    """A query and the name of its series."""

    legend: str
    expr: str
    axis: Literal["left", "right"] = "left"
    decimals: int | None = None
    bold: bool = False  # the one to look at first
    none: str = ""  # for series that exist only after the first event: the label of a series `none` in their place

    @property
    def query(self) -> str:
        """The expression that Prometheus gets."""
        expr = self.expr
        for short, selector in SELECTORS.items():
            expr = expr.replace(short, selector)
        return f'{expr} or label_replace(vector(0), "{self.none}", "none", "", "")' if self.none else expr


@dataclass(frozen=True, slots=True)
class Row:
    """A title above the panels that follow."""

    title: str


@dataclass(frozen=True, slots=True)
class Number:
    """A large number, with its course behind it."""

    title: str
    expr: str
    about: str
    unit: str = "none"
    steps: Steps = NEUTRAL
    decimals: int | None = None
    graph: bool = True
    legend: str = ""
    width: int = 4
    height: int = 4

    def panel(self) -> Any:
        panel = (
            stat.Panel()
            .unit(self.unit)
            .thresholds(_thresholds(self.steps))
            .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
            .color_mode(common_models.BigValueColorMode.VALUE)
            .graph_mode(common_models.BigValueGraphMode.AREA if self.graph else common_models.BigValueGraphMode.NONE)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
            .no_value("–")
        )
        if self.decimals is not None:
            panel.decimals(self.decimals)
        return panel

    def queries(self) -> list[Any]:
        return _ranges([Line(self.legend or self.title, self.expr)])


@dataclass(frozen=True, slots=True)
class Graph:
    """Lines over time."""

    title: str
    lines: Sequence[Line]
    about: str
    unit: str = "none"
    width: int = 12
    height: int = 8
    stacked: bool = False
    steps: Steps | None = None
    low: float | None = 0
    high: float | None = None
    log: bool = False
    held: bool = False  # values stay until the next one, and are drawn as steps
    counts: bool = False  # of rare events: the axis ends at 4, not at 100, while there are none

    def panel(self) -> Any:
        panel = (
            timeseries.Panel()
            .unit(self.unit)
            .line_width(1)
            .fill_opacity(35 if self.stacked else 0)
            .show_points(common_models.VisibilityMode.NEVER)
            .span_nulls(False)
            .legend(
                common.VizLegendOptions()
                .display_mode(common_models.LegendDisplayMode.LIST)
                .placement(common_models.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["lastNotNull"])
            )
            .tooltip(
                common.VizTooltipOptions()
                .mode(common_models.TooltipDisplayMode.MULTI)
                .sort(common_models.SortOrder.DESCENDING)
            )
        )
        if self.held:
            panel.line_interpolation(common_models.LineInterpolation.STEP_AFTER)
        if self.low is not None:
            panel.axis_soft_min(self.low)
            if self.counts:
                panel.axis_soft_max(4)
        if self.high is not None:
            panel.max(self.high)
        if self.stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
        if self.log:
            panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
        if self.steps is not None:
            panel.thresholds(_thresholds(self.steps)).thresholds_style(
                common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
            )
        for number, line in enumerate(self.lines):
            properties: dict[str, Any] = {}
            if line.axis == "right":
                properties |= {"custom.axisPlacement": "right", "unit": "none"}
            if line.decimals is not None:
                properties["decimals"] = line.decimals
            if line.bold:
                properties |= {"custom.lineWidth": 4, "color": {"mode": "fixed", "fixedColor": "white"}}
            if properties:
                panel.override_by_query(_letter(number), _overrides(properties))
        return panel

    def queries(self) -> list[Any]:
        return _ranges(self.lines)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table by node."""

    title: str
    expr: str
    unit: str = "none"
    steps: Steps | None = None


@dataclass(frozen=True, slots=True)
class ByNode:
    """A table with a line for each node: each column's query has exactly the label `node`."""

    title: str
    columns: Sequence[Column]
    about: str
    width: int = WIDTH
    height: int = 7

    def panel(self) -> Any:
        names = {f"Value #{_letter(number)}": column.title for number, column in enumerate(self.columns)}
        options = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {"node": "Node", **names}}
        panel = (
            table.Panel()
            .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
            .with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
        )
        for column in self.columns:
            properties: dict[str, Any] = {"unit": column.unit}
            if column.steps is not None:
                properties["thresholds"] = _thresholds(column.steps).build()
                properties |= {"color": {"mode": "thresholds"}, "custom.cellOptions": {"type": "color-text"}}
            panel.override_by_name(column.title, _overrides(properties))
        return panel

    def queries(self) -> list[Any]:
        return [
            _query(number, Line("", column.expr).query).instant().format(PromQueryFormat.TABLE)
            for number, column in enumerate(self.columns)
        ]


@dataclass(frozen=True, slots=True)
class Words:
    """Markdown."""

    title: str
    markdown: Callable[[], str]
    width: int = WIDTH
    height: int = 6

    def panel(self) -> Any:
        return text.Panel().mode(TextMode.MARKDOWN).content(self.markdown())


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard as a table of its panels, which are laid out from the top left."""

    name: str
    about: str
    panels: Sequence[Row | Number | Graph | ByNode | Words]
    per_node: bool = False

    def build(self) -> Any:
        """The dashboard, as the SDK's model."""
        builder = (
            dashboard.Dashboard(f"farloop / {self.name.capitalize()}")
            .uid(f"farloop-{self.name}")
            .description(self.about)
            .tags(["farloop"])
            .editable()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .timezone("browser")
            .refresh("10s")
            .time("now-1h", "now")
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
            .with_variable(_choice("coordinator", "Coordinator", "label_values(farloop_run_info, instance)"))
            .link(
                dashboard.DashboardLink("farloop")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["farloop"])
                .as_dropdown(False)
                .include_vars(True)
                .keep_time(True)
            )
        )
        if self.per_node:
            query = 'label_values(farloop_node_connected{instance=~"$coordinator"}, node)'
            builder.with_variable(_choice("node", "Node", query, all_of_them=False))
            query = "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)"
            builder.with_variable(_choice("gpu_host", "Host of its GPUs", query))
        for name, expr, colour in ANNOTATIONS:
            query = Line(name, expr).query
            builder.annotation(
                dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(query)
            )
        x = y = height = 0
        for one in self.panels:
            if isinstance(one, Row) or x + one.width > WIDTH:
                x, y, height = 0, y + height, 0
            if isinstance(one, Row):
                builder.with_row(dashboard.Row(one.title).grid_pos(models.GridPos(x=0, y=y, w=WIDTH, h=1)))
                y += 1
                continue
            panel = one.panel().title(one.title).grid_pos(models.GridPos(x=x, y=y, w=one.width, h=one.height))
            if not isinstance(one, Words):
                panel.description(one.about).datasource(SOURCE)
                for query in one.queries():
                    panel.with_target(query)
            x, height = x + one.width, max(height, one.height)
            builder.with_panel(panel)
        return builder.build()


def _choice(name: str, label: str, query: str, *, all_of_them: bool = True) -> Any:
    choice = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    if all_of_them:
        everything = models.VariableOption(text=["All"], value=["$__all"], selected=True)
        choice.include_all(True).all_value(".*").multi(True).current(everything)
    return choice


def _ranges(lines: Sequence[Line]) -> list[Any]:
    return [_query(number, line.query).range().legend_format(line.legend) for number, line in enumerate(lines)]


def _query(number: int, expr: str) -> Any:
    return prometheus.Dataquery().expr(expr).ref_id(_letter(number)).datasource(SOURCE)


def _overrides(properties: dict[str, Any]) -> list[Any]:
    return [models.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number]


def _thresholds(steps: Steps) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )
