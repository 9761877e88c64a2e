"""The frame of a report page: its look in light and dark, and nothing of its contents."""

from string import Template


def render_page(*, title: str, lead: str, cards: str, body: str) -> str:
    """A whole HTML document; all four are HTML already."""
    return _PAGE.substitute(title=title, lead=lead, cards=cards, body=body, style=_STYLE)


_STYLE = """
:root {
  color-scheme: light dark;
  --page: #fafaf8; --raised: #ffffff; --ink: #1b1e23; --muted: #646b75; --grid: #e3e4e1;
  --good: #0b7d55; --bad: #b3261e;
  --s1: #2563c9; --s2: #0d8f72; --s3: #b86e00; --s4: #a8328a; --s5: #6247cf; --s6: #c2410c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --raised: #1c1f25; --ink: #e9eaec; --muted: #9aa2ad; --grid: #31353d;
    --good: #4fd1a0; --bad: #ff8a80;
    --s1: #7db0ff; --s2: #4fd1a8; --s3: #f2b457; --s4: #ea8bd0; --s5: #b3a1ff; --s6: #ff9a6b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 3.5rem 1.5rem 4rem; max-width: 64rem;
  background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
h1 { margin: 0; font-size: 2.1rem; line-height: 1.2; letter-spacing: -0.02em; }
h2 { margin: 0 0 0.9rem; font-size: 1.2rem; letter-spacing: -0.01em; }
.lead { margin: 0.5rem 0 2rem; color: var(--muted); font-size: 1.08rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: 0.9rem; }
.card { padding: 1.05rem 1.2rem 1.1rem; background: var(--raised); border: 1px solid var(--grid); border-radius: 10px; }
.card .label { color: var(--muted); font-size: 0.86rem; }
.card .value { margin: 0.1rem 0 0.15rem; font-size: 2.15rem; font-weight: 650;
  line-height: 1.2; letter-spacing: -0.02em; }
.card .note { color: var(--muted); font-size: 0.86rem; line-height: 1.4; }
.card.good .value { color: var(--good); }
.card.bad .value { color: var(--bad); }
section { margin-top: 2.8rem; }
figure { margin: 0; }
.plot { padding: 1rem 0.8rem 0.4rem; background: var(--raised); border: 1px solid var(--grid);
  border-radius: 10px; overflow-x: auto; }
.plot svg { display: block; width: 100%; min-width: 40rem; height: auto; }
figcaption, p.note { margin: 0.7rem 0 0; max-width: 52rem; color: var(--muted); font-size: 0.9rem; }
p.note { margin: 0 0 0.9rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.5rem 0.85rem 0.5rem 0; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--muted); font-weight: 500; font-size: 0.86rem; white-space: nowrap; }
tbody td:first-child { font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
.facts th { width: 15rem; color: var(--muted); font-weight: 400; }
code { font: 0.9em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.yes { color: var(--good); white-space: nowrap; }
.no { color: var(--bad); }
summary { cursor: pointer; color: var(--muted); margin-bottom: 0.6rem; }
footer { margin-top: 3.5rem; color: var(--muted); font-size: 0.86rem; }
@media print { body { padding: 0; max-width: none; } section { break-inside: avoid; } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p class="lead">$lead</p></header>
<main>
<div class="cards">$cards</div>
$body
</main>
<footer>Written by farloop. This page is complete: it loads nothing.</footer>
</body>
</html>
""")
