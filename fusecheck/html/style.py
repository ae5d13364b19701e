"""The style sheet of every page: light, dark, print, and narrow as a telephone."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#f4f6f8;--card:#fff;--ink:#1b1f24;--dim:#4f5965;--line:#d5dbe1;--track:#e7ebef;
--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffe9e7;--warn:#744500;--warn-bg:#fff4c7;--mute-bg:#e9edf1;
--a:#1f5fbf;--b:#0b6e66;--c:#7436d6}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--dim:#a3acb6;--line:#30363d;
--track:#262d36;--good:#5fd877;--good-bg:#12301c;--bad:#ff8f88;--bad-bg:#3c1618;--warn:#ecc35c;--warn-bg:#33290f;
--mute-bg:#252b33;--a:#2f6fd0;--b:#12807a;--c:#8450e0}}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--dim:#444;--line:#bbb;--track:#e7ebef;
--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffe9e7;--warn:#744500;--warn-bg:#fff4c7;--mute-bg:#e9edf1;
--a:#1f5fbf;--b:#0b6e66;--c:#7436d6}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.card,tr,h2,h3{break-inside:avoid}h2,h3{break-after:avoid}main{padding:0!important}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:28px 24px 48px}
h1,h2,h3,p,ul,dl,table{margin:0}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:36px 0 12px}
h3{font-size:1rem;line-height:1.4;overflow-wrap:anywhere}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.875em;
overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px}
.card+.card{margin-top:14px}
.hero{border-left:8px solid var(--tone);padding:22px 24px}
.hero h1 span{color:var(--tone)}
.hero p{margin-top:8px}.hero .path{color:var(--dim)}
.hero ul{margin-top:10px}
.pass{--tone:var(--good);--tone-bg:var(--good-bg)}.fail{--tone:var(--bad);--tone-bg:var(--bad-bg)}
.warn{--tone:var(--warn);--tone-bg:var(--warn-bg)}.mute{--tone:var(--dim);--tone-bg:var(--mute-bg)}
.chip{display:inline-block;background:var(--tone-bg);color:var(--tone);border-radius:999px;padding:1px 10px;
font-size:.8125rem;font-weight:600;white-space:nowrap}
.trio,.duo{display:grid;gap:14px;margin-top:14px}
.trio{grid-template-columns:repeat(3,minmax(0,1fr))}.duo{grid-template-columns:repeat(2,minmax(0,1fr))}
.trio .card,.duo .card{margin-top:0}
.trio h2,.duo h2{margin:0 0 6px;font-size:1rem;display:flex;justify-content:space-between;align-items:center;gap:8px}
.trio p{font-size:.9375rem;color:var(--dim)}
ul{padding-left:1.15em}li{margin:4px 0;overflow-wrap:anywhere}
.duo ul{font-size:.9375rem}
.head{display:flex;flex-wrap:wrap;gap:6px 14px;justify-content:space-between;align-items:center}
.chips{display:flex;flex-wrap:wrap;gap:6px}
.size{color:var(--dim);font-size:.875rem;margin:2px 0 12px}
svg{display:block;width:100%;overflow:visible}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;fill:var(--dim)}
svg .on{fill:#fff;font-weight:600}svg .fg{fill:var(--ink)}
.p0{fill:var(--a)}.p1{fill:var(--b)}.p2{fill:var(--c)}.p3{fill:var(--dim)}
.map rect{stroke:var(--card);stroke-width:2}
.track{fill:var(--track)}.bar{fill:var(--a)}.bar.worse{fill:var(--bad)}
.limit{stroke:var(--ink);stroke-width:2}.tick{stroke:var(--ink);stroke-width:1;opacity:.5}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;padding:0;margin-top:8px;font-size:.875rem}
.legend li{margin:0;color:var(--dim)}.legend b{color:var(--ink)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.legend .p0{background:var(--a)}.legend .p1{background:var(--b)}.legend .p2{background:var(--c)}
.facts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px 32px;margin-top:18px;padding-top:16px;
border-top:1px solid var(--line)}
.facts section+section{margin-top:18px}
.facts h4{margin:0 0 8px;font-size:.875rem;display:flex;justify-content:space-between;gap:8px;font-weight:600}
.facts h4 span{font-weight:400;color:var(--dim)}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:3px 16px;font-size:.875rem}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
table{width:100%;border-collapse:collapse;font-size:.875rem}
caption{text-align:left;color:var(--dim);font-size:.875rem;padding-bottom:8px}
th,td{text-align:left;vertical-align:top;padding:8px 14px 8px 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
thead th{color:var(--dim);font-weight:600;white-space:nowrap}
tbody th{font-weight:600}tbody tr:last-child>*{border-bottom:0}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.plot{width:26%;min-width:160px;vertical-align:middle}
.stack>tbody>tr>th{white-space:nowrap}.nb{white-space:nowrap}
.found{table-layout:fixed}.found .n,.found tbody th{white-space:normal!important}
.found th:nth-child(1){width:20%}.found th:nth-child(2){width:25%}.found th:nth-child(3){width:19%}
.found th:nth-child(4){width:10%}.found th:nth-child(5){width:9%}.found th:nth-child(6){width:17%}
.small{font-size:.875rem;color:var(--dim)}
footer{margin-top:32px;color:var(--dim);font-size:.875rem}
@media (max-width:680px){main{padding:14px 12px 32px}h1{font-size:1.625rem}.card{padding:14px}
.trio,.duo,.facts{grid-template-columns:minmax(0,1fr)}
.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.stack,.stack tbody,.stack tr,.stack caption{display:block}
.stack tr{padding:10px 0;border-bottom:1px solid var(--line)}.stack tr:last-child{border-bottom:0}
.stack th,.stack td{display:grid;grid-template-columns:112px minmax(0,1fr);gap:10px;border:0;padding:2px 0;
text-align:left;white-space:normal!important;width:auto!important}
.stack th::before,.stack td::before{content:attr(data-label);color:var(--dim);font-weight:400}
.stack td:empty{display:none}.plot{width:auto;min-width:0}.stack .plot{margin-top:6px}}
"""
