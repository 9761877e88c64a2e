"""Panels of the Grafana dashboards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

# --- What the dashboards share: whose series they show, and what they mark in time.


C = '{instance=~"$coordinator"}'
"""Series of the chosen coordinators."""

CN = '{instance=~"$coordinator",node=~"$node"}'
"""What they tell of the chosen nodes."""

N = '{node=~"$node"}'
"""What the chosen nodes tell themselves."""

G = '{Hostname=~"$gpu_host"}'
"""NVIDIA's exporter on the chosen hosts."""

HAPPENED = (
    ("Coordinator restarted", f"changes(farloop_epoch{C}[1m]) > 0", "red"),
    ("Node restarted", f"changes(farloop_node_incarnation{C}[1m]) > 0", "orange"),
    ("H changed", f"changes(farloop_h_steps{C}[1m]) > 0", "blue"),
)
"""Annotations."""


def some(expr: str, label: str) -> str:
    """Series that are there only once something has happened; before, one that says "none"."""
    return f'{expr} or label_replace(vector(0), "{label}", "none", "", "")'


# --- What the dashboards are built from: panels with our habits of units, legends and thresholds, laid out in rows.
#
# Needs grafana-foundation-sdk: it knows the fields that Grafana has.


WIDTH = 24
"""Columns of a dashboard."""

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from this value on this colour; the first from None."""

GOOD_IF_HIGH: Steps = ((None, "red"), (0.6, "orange"), (0.85, "green"))
"""For shares of which 1 is best."""

GOOD_IF_ZERO: Steps = ((None, "green"), (1, "red"))

NEUTRAL: Steps = ((None, "blue"),)


@dataclass(frozen=True, slots=True)
class Line:
    """A query and the name of its series."""

    expr: str
    legend: str = ""
    axis: Literal["left", "right"] = "left"
    unit: str = ""
    """On the right axis."""
    decimals: int | None = None
    bold: bool = False
    """The one to look at first."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table by node."""

    title: str
    expr: str
    unit: str
    steps: Steps | None = None


@dataclass(slots=True)
class Page:
    """One dashboard, filled from the top left."""

    title: str
    uid: str
    about: str
    annotations: Sequence[tuple[str, str, str]] = ()
    """Name, expression that is above zero where something happened, colour."""
    per_node: bool = False
    _x: int = 0
    _y: int = 0
    _height: int = 0
    _builder: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._builder = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
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
            self._builder.with_variable(_choice("node", "Node", query, all_of_them=False))
            query = "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)"
            self._builder.with_variable(_choice("gpu_host", "Host of its GPUs", query))
        for name, expr, colour in self.annotations:
            self._builder.annotation(
                dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)
            )

    def row(self, title: str) -> None:
        """What follows stands under this."""
        self._break()
        self._builder.with_row(dashboard.Row(title).grid_pos(models.GridPos(x=0, y=self._y, w=WIDTH, h=1)))
        self._y += 1

    def number(
        self,
        title: str,
        expr: str,
        unit: str,
        about: str,
        *,
        steps: Steps = NEUTRAL,
        width: int = 4,
        decimals: int | None = None,
        graph: bool = True,
        legend: str = "",
        calc: str = "lastNotNull",
    ) -> None:
        """One large number, with its course behind it."""
        panel = (
            stat.Panel()
            .title(title)
            .description(about)
            .datasource(SOURCE)
            .unit(unit)
            .thresholds(_thresholds(steps))
            .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
            .color_mode(common_models.BigValueColorMode.VALUE)
            .graph_mode(common_models.BigValueGraphMode.AREA if graph else common_models.BigValueGraphMode.NONE)
            .reduce_options(common.ReduceDataOptions().calcs([calc]).values(False))
            .no_value("–")
        )
        if decimals is not None:
            panel.decimals(decimals)
        self._add(panel, [Line(expr, legend or title)], width, 4)

    def graph(
        self,
        title: str,
        lines: Sequence[Line],
        unit: str,
        about: str,
        *,
        width: int = 12,
        height: int = 8,
        stacked: bool = False,
        steps: Steps | None = None,
        low: float | None = 0,
        high: float | None = None,
        log: bool = False,
        held: bool = False,
        counts: bool = False,
    ) -> None:
        """Lines over time. `held`: values that stay until the next one, drawn as steps; `counts`: of what is
        rare, where an axis to a hundred would be odd."""
        panel = (
            timeseries.Panel()
            .title(title)
            .description(about)
            .datasource(SOURCE)
            .unit(unit)
            .line_width(1)
            .fill_opacity(35 if stacked else 0)
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
        if held:
            panel.line_interpolation(common_models.LineInterpolation.STEP_AFTER)
        if low is not None:
            panel.axis_soft_min(low)
            if counts:
                panel.axis_soft_max(4)
        if high is not None:
            panel.max(high)
        if stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
        if log:
            panel.scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
        if steps is not None:
            panel.thresholds(_thresholds(steps)).thresholds_style(
                common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
            )
        for number, line in enumerate(lines):
            properties = []
            if line.axis == "right":
                properties += [
                    models.DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
                    models.DynamicConfigValue(id_val="unit", value=line.unit),
                ]
            if line.decimals is not None:
                properties.append(models.DynamicConfigValue(id_val="decimals", value=line.decimals))
            if line.bold:
                properties += [
                    models.DynamicConfigValue(id_val="custom.lineWidth", value=4),
                    models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": "white"}),
                ]
            if properties:
                panel.override_by_query(_letter(number), properties)
        self._add(panel, lines, width, height)

    def by_node(
        self, title: str, columns: Sequence[Column], about: str, *, width: int = WIDTH, height: int = 7
    ) -> None:
        """A table with a line for each node: each column's query has exactly the label `node`."""
        panel = (
            table.Panel()
            .title(title)
            .description(about)
            .datasource(SOURCE)
            .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
            .with_transformation(
                models.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {"Time": True},
                        "indexByName": {},
                        "renameByName": {
                            "node": "Node",
                            **{f"Value #{_letter(i)}": column.title for i, column in enumerate(columns)},
                        },
                    },
                )
            )
        )
        for column in columns:
            properties = [models.DynamicConfigValue(id_val="unit", value=column.unit)]
            if column.steps is not None:
                properties += [
                    models.DynamicConfigValue(id_val="thresholds", value=_thresholds(column.steps).build()),
                    models.DynamicConfigValue(id_val="color", value={"mode": "thresholds"}),
                    models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
                ]
            panel.override_by_name(column.title, properties)
        lines = [Line(column.expr) for column in columns]
        self._add(panel, lines, width, height, as_table=True)

    def words(self, title: str, markdown: str, *, width: int = WIDTH, height: int = 6) -> None:
        """Text."""
        self._add(text.Panel().title(title).mode(TextMode.MARKDOWN).content(markdown), [], width, height)

    def build(self) -> Any:
        """The dashboard, as the SDK's model."""
        return self._builder.build()

    def _add(self, panel: Any, lines: Sequence[Line], width: int, height: int, *, as_table: bool = False) -> None:
        for number, line in enumerate(lines):
            query = prometheus.Dataquery().expr(line.expr).ref_id(_letter(number)).datasource(SOURCE)
            if as_table:
                query.instant().format(PromQueryFormat.TABLE)
            else:
                query.range().legend_format(line.legend)
            panel.with_target(query)
        if self._x + width > WIDTH:
            self._break()
        panel.grid_pos(models.GridPos(x=self._x, y=self._y, w=width, h=height))
        self._x, self._height = self._x + width, max(self._height, height)
        self._builder.with_panel(panel)

    def _break(self) -> None:
        self._y, self._x, self._height = self._y + self._height, 0, 0


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


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number]


def _thresholds(steps: Steps) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )
