"""How reports look: one stylesheet, light and dark, nothing from elsewhere."""

STYLE = """
:root { --ground: #fbfaf8; --card: #ffffff; --ink: #1d2129; --soft: #626977; --edge: #e3e1dc; --grid: #ecebe7;
  --c0: #b3541e; --c1: #1f6f8b; --c2: #5b7f2b; --c3: #8a4f9e; --fault: #b3261e; --warning: #9a6700; --note: #1f6f8b;
  --healthy: #2e7d4f; --low: #c8452f; --mid: #f3e9d8; --high: #3b8f6a; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171c; --card: #1d2027; --ink: #e8e6e1; --soft: #9aa1ad;
  --edge: #2e323b; --grid: #2a2e36; --c0: #f0955a; --c1: #62b6d3; --c2: #a5cc6b; --c3: #c99adb; --fault: #ff8a80;
  --warning: #f0c060; --note: #7cc4e0; --healthy: #7fd3a2; --low: #a8402f; --mid: #39352c; --high: #2f7a58; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 19px; margin: 40px 0 6px; } h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0 12px; } .soft, figcaption { color: var(--soft); } figcaption { font-size: 13px; margin-top: 4px; }
.grid-of { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 16px; }
.card, figure { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px;
  margin: 0; }
.big { font-size: 28px; font-weight: 650; letter-spacing: -.02em; } .big small { font-size: 14px; font-weight: 400;
  color: var(--soft); }
svg { width: 100%; height: auto; display: block; margin-top: 6px; }
.grid { stroke: var(--grid); } .tick, .name { fill: var(--soft); font-size: 11px; } .reference { stroke: var(--soft);
  stroke-dasharray: 3 4; }
.line { fill: none; stroke-width: 2; } .line.dashed { stroke-dasharray: 5 4; } .band { opacity: .16; stroke: none; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); }
.band.c0, .point.c0 { fill: var(--c0); } .band.c1, .point.c1 { fill: var(--c1); }
.band.c2, .point.c2 { fill: var(--c2); } .band.c3, .point.c3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12.5px; color: var(--soft); margin-top: 4px; }
.legend i { display: inline-block; width: 16px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: 6px; } .legend i.dashed { border-top-style: dashed; }
.legend .c0 { color: var(--c0); } .legend .c1 { color: var(--c1); } .legend .c2 { color: var(--c2); }
.legend .c3 { color: var(--c3); }
ul.verdict { list-style: none; padding: 0; margin: 8px 0 0; }
ul.verdict li { padding: 9px 0 9px 88px; border-top: 1px solid var(--edge); position: relative; }
ul.verdict b.level { position: absolute; left: 0; font-size: 12px; text-transform: uppercase; letter-spacing: .04em; }
.fault { color: var(--fault); } .warning { color: var(--warning); } .note { color: var(--note); }
.healthy { color: var(--healthy); } li .soft { font-size: 13.5px; display: block; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 9px; text-align: right; border-bottom: 1px solid var(--edge); } th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; } td.left-out { text-align: left; color: var(--soft); }
tr.group td { font-weight: 600; padding-top: 14px; border-bottom-color: var(--soft); }
.scroll { overflow-x: auto; } code { font-size: 13px; } .nothing { color: var(--soft); }
footer { margin-top: 48px; color: var(--soft); font-size: 13px; }
"""
