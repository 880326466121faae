"""How the report looks, by day and by night, on screen and on paper."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1b2330; --muted: #667085; --grid: #e8ebf0; --axis: #98a2b3; --card: #f7f8fa;
  --edge: #e4e7ec; --warn: #fff6e5; --warn-edge: #f0b429; --bad: #d92d20; --wait: #e9a23b; --unsent: #98a2b3;
  --c0: #0e8fb3; --c1: #2563eb; --c2: #6d3be0; --c3: #b026c9; --c4: #dd2a5f; --c5: #e05a10;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181f; --ink: #e6e9ef; --muted: #98a2b3; --grid: #262c36; --axis: #5b6472; --card: #1b2029;
    --edge: #2b323d; --warn: #33270e; --warn-edge: #b7851c; --bad: #ff7a6e; --wait: #d9962f; --unsent: #5b6472;
    --c0: #3fbfe0; --c1: #6b9bff; --c2: #a483ff; --c3: #df78f2; --c4: #ff7599; --c5: #ff9355;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; font-weight: 650; margin: 44px 0 12px; padding-top: 20px; border-top: 1px solid var(--edge); }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
.lead { color: var(--muted); margin: 0 0 20px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0 0 20px; font-size: 14px; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { background: var(--card); border-left: 3px solid var(--c1); border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; }
.warning { background: var(--warn); border-left-color: var(--warn-edge); }
.scroll { overflow-x: auto; margin: 0 0 20px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; border-bottom: 1px solid var(--axis); }
th, td { padding: 5px 14px 5px 0; text-align: right; white-space: nowrap; }
td { border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child, .words th:last-child, .words td:last-child { text-align: left; }
.words th:last-child, .words td:last-child { padding-left: 10px; color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 28px 32px; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figcaption p { color: var(--muted); font-size: 13px; margin: 1px 0 0; }
.nothing { color: var(--muted); background: var(--card); border-radius: 4px; padding: 28px 14px; text-align: center; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; margin-top: 4px; }
h2 + .legend { margin: -4px 0 18px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: var(--c); }
svg { width: 100%; height: auto; display: block; margin-top: 6px; font-family: inherit; }
svg text { font-size: 12px; fill: var(--ink); }
svg .tick { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--muted); font-size: 12px; }
svg .label { fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--axis); }
.limit { stroke: var(--muted); stroke-dasharray: 5 4; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.thin { stroke-width: 1.2; }
.area { fill: var(--c); fill-opacity: 0.16; stroke: none; }
.dot { fill: var(--c); stroke: var(--paper); stroke-width: 1.5; }
.bar { fill: var(--c); }
.cross { stroke: var(--bad); stroke-width: 1.8; }
.failed { --c: var(--bad); }
.wait { --c: var(--wait); }
.unsent { --c: var(--unsent); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
footer { color: var(--muted); font-size: 13px; margin-top: 48px; border-top: 1px solid var(--edge); padding-top: 16px; }
code { font-family: ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; font-size: 0.92em;
  overflow-wrap: anywhere; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } }
"""
