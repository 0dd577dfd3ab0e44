// The style sheet as text.
#include "foci/report/style.h"

#include <string>

namespace foci::report {
namespace {

constexpr std::string_view kLight = R"(
--paper:#ffffff;--card:#f6f7f9;--edge:#dfe3e8;--ink:#1b2430;--soft:#5a6675;--cell:#e9edf2;
--c0:#0067a5;--c1:#c44e00;--c2:#007f5f;--c3:#8f3f97;--good:#00694f;--bad:#b3261e;--link:#005a9c;
--on:#ffffff;)";

constexpr std::string_view kDark = R"(
--paper:#12161c;--card:#1a2029;--edge:#313b48;--ink:#e8ecf1;--soft:#a3afbd;--cell:#29323e;
--c0:#58a9e6;--c1:#f08a4b;--c2:#3fbf9a;--c3:#d392d9;--good:#5fd0ae;--bad:#ff8a80;--link:#7cc0f5;
--on:#0d1117;)";

constexpr std::string_view kChart = R"(
svg{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
svg text{fill:var(--ink);font-variant-numeric:tabular-nums}
.title{font-size:15px;font-weight:600}
.label{font-size:13px}.tick{font-size:12px;fill:var(--soft)}.small{font-size:11.5px}
.mid{text-anchor:middle}.end{text-anchor:end}.strong{font-weight:600}
svg .tick{fill:var(--soft)}svg .good{fill:var(--good);font-weight:600}
svg .bad{fill:var(--bad);font-weight:600}svg .on{fill:var(--on)}
.grid{stroke:var(--edge);fill:none}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.c0,.interval.c0,.mark.c0{stroke:var(--c0)}.line.c1,.interval.c1,.mark.c1{stroke:var(--c1)}
.line.c2,.interval.c2,.mark.c2{stroke:var(--c2)}.line.c3,.interval.c3,.mark.c3{stroke:var(--c3)}
.dot.c0,.bar.c0,.band.c0{fill:var(--c0)}.dot.c1,.bar.c1,.band.c1{fill:var(--c1)}
.dot.c2,.bar.c2,.band.c2{fill:var(--c2)}.dot.c3,.bar.c3,.band.c3{fill:var(--c3)}
.dot{stroke:var(--paper);stroke-width:1.5}.band{opacity:.22}
.track{stroke:var(--cell);stroke-width:10;stroke-linecap:round}
.interval{stroke-width:10;stroke-linecap:round;opacity:.45}
.chance{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:4 3;fill:none}
.cell{fill:var(--cell)}.mark{stroke-width:3;fill:none}.mark.edge{stroke:var(--card);stroke-width:6}
.px{image-rendering:pixelated}
.veil{fill:#000;opacity:.28}
.under,.over,.ring,.top{fill:none;vector-effect:non-scaling-stroke}
.under{stroke:#000;stroke-width:3;opacity:.6}.over{stroke:#5ff0ff;stroke-width:1.5}
.ring{stroke:#000;stroke-width:3;opacity:.75}.top{stroke:#fff;stroke-width:1.5}
)";

constexpr std::string_view kPage = R"(
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.55;font-size:16px;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:1360px;margin:0 auto;padding:0 clamp(16px,3vw,40px)}
header{padding-top:clamp(24px,5vw,56px)}
h1,h2,dt,a{overflow-wrap:anywhere}h1{font-size:clamp(1.6rem,4.2vw,2.5rem);line-height:1.15;margin:0 0 .4em;letter-spacing:-.015em;
text-wrap:balance}
h2{font-size:1.35rem;line-height:1.25;margin:0 0 .3em;letter-spacing:-.005em}
p{margin:.3em 0 .8em;max-width:72ch;overflow-wrap:anywhere}.lead{font-size:1.1rem;color:var(--ink)}
section{margin:44px 0 0;padding-top:22px;border-top:1px solid var(--edge)}
.how{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:18px 0 0;font-size:.95rem}
a{color:var(--link);text-underline-offset:2px}a:focus-visible{outline:2px solid var(--link)}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
margin:22px 0 0;padding:0}
.numbers div{background:var(--card);border:1px solid var(--edge);border-radius:10px;
padding:12px 14px}
.numbers dt{font-size:.85rem;color:var(--soft);line-height:1.3}
.numbers dd{margin:0}.numbers .value{font-size:1.55rem;font-weight:650;line-height:1.3;
font-variant-numeric:tabular-nums;letter-spacing:-.01em;overflow-wrap:anywhere}
.numbers .note{font-size:.8rem;color:var(--soft);line-height:1.35}
.cards{display:grid;gap:16px;margin:16px 0 0;
grid-template-columns:repeat(auto-fill,minmax(min(100%,max(340px,50% - 8px)),1fr))}
.flow{columns:480px;column-gap:16px;margin:16px 0 0}.flow.many{columns:350px}.flow.slim{columns:220px}
.flow.wide,.flow.one{columns:auto}
.flow figure{break-inside:avoid;margin:0 0 16px;max-width:none}
.side{display:grid;gap:8px 16px;align-items:start;
grid-template-columns:repeat(auto-fit,minmax(min(100%,max(340px,50% - 8px)),1fr))}
.scene p{margin:0}.scene .name{font-size:.85rem;color:var(--soft);line-height:1.35}
.scene .verdict{line-height:1.4;margin-bottom:8px;overflow-wrap:anywhere}.scene .verdict b{font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}.soft{color:var(--soft)}
.tile{min-width:0}.tile svg{display:block;margin:0 auto;overflow:visible}
.tile span,.layer>span{display:block;font-size:.75rem;line-height:1.5;color:var(--soft);text-align:center;
overflow-wrap:anywhere}
.looks{display:flex;flex-wrap:wrap;gap:14px}
.whole,.pair{display:flex;gap:10px}.whole{flex:1 1 130px;flex-direction:column}
.layers{flex:3.2 1 300px;min-width:0}
.pair>*{flex:1 1 0}.many .whole{flex-basis:100%;flex-direction:row}.many .whole>*{flex:1 1 0}
.many .layers{flex-basis:100%}.slim .verdict .soft{display:block}
.layer{display:flex;gap:4px;margin:0 0 6px}.layer>span{writing-mode:vertical-rl;transform:rotate(180deg)}
.heads{flex:1;min-width:0;display:grid;gap:6px;
grid-template-columns:repeat(auto-fill,minmax(max(60px,calc((100% - (var(--heads) - 1)*6px)/var(--heads) - .01px)),1fr))}
.index{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(84px,1fr));padding:0;margin:14px 0 0;
list-style:none}.index a{display:block;text-decoration:none}.index .tile span{color:var(--link)}
@media (max-width:560px){
main,header,footer{padding-left:10px;padding-right:10px}figure{padding:10px 8px 6px}
.whole{flex-basis:100%;flex-direction:row}.whole>*{flex:1 1 0}.layers{flex-basis:100%}
}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;
padding:14px 14px 8px;min-width:0;max-width:720px;display:flex;flex-direction:column}
figure>svg{display:block;width:100%;height:auto}
figcaption{font-size:.82rem;color:var(--soft);line-height:1.45;margin:8px 0 2px;
overflow-wrap:anywhere}
.get{font-size:.8rem;margin:auto 0 0;padding-top:4px;display:flex;gap:14px}
.key{display:flex;flex-wrap:wrap;gap:6px 22px;padding:0;margin:10px 0 0;list-style:none;
font-size:.9rem;color:var(--soft)}
.key li{display:flex;align-items:center;gap:8px}
.key svg{flex:none}.key svg path:not([class]){fill:#555}
.ramp{width:64px;height:14px;border-radius:3px;
background:linear-gradient(90deg,#2a2a2a,#ffbe0b 30%,#fb5607 60%,#d0003c)}
table{border-collapse:collapse;font-size:.9rem;margin:12px 0 0}
th,td{text-align:left;padding:4px 14px 4px 0;vertical-align:top;border-bottom:1px solid
var(--edge);overflow-wrap:anywhere}
th{font-weight:500;color:var(--soft)}td{font-variant-numeric:tabular-nums}
.short th{white-space:nowrap}.prov th{min-width:7em;max-width:12em}
.prov td{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.84rem}
footer{margin-top:44px;padding-bottom:56px}
@media print{
body{font-size:11pt}section{break-inside:auto;margin-top:18pt}nav,.get{display:none}
figure,.numbers div{break-inside:avoid;background:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.cards{grid-template-columns:repeat(2,1fr)}.flow{columns:2}.flow.slim{columns:3}
.flow.one,.flow.wide{columns:auto}.index{display:none}
}
)";

}  // namespace

std::string_view chart_style() {
  static const std::string style = ":root{" + std::string(kLight) + "}" + std::string(kChart);
  return style;
}

std::string_view page_style() {
  static const std::string style =
      ":root{" + std::string(kLight) + "}@media screen and (prefers-color-scheme:dark){:root{" +
      std::string(kDark) + "}}" + std::string(kChart) + std::string(kPage);
  return style;
}

}  // namespace foci::report
