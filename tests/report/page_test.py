"""Opens pages in Chromium: nothing is requested, nothing complains, everything is painted.

usage: page_test.py COMMAND ARGUMENT...   where {} stands for the folder to write pages into
FOCI_SCREENSHOTS names a folder to keep pictures of the pages in.
"""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import browser  # noqa: E402

SCALE = 0.5  # of the screenshots whose pixels are looked at: a quarter of the work

failures = []


def check(ok, what):
    if not ok:
        failures.append(what)
        print("FAILED:", what)


# Every picture of the page (in <img> and in SVG), decoded afresh.
DECODE = """
const done = arguments[arguments.length - 1];
const sources = [...document.querySelectorAll('image')].map(i => i.getAttribute('href'))
    .concat([...document.images].map(i => i.src));
Promise.all(sources.map(s => new Promise(r => {
  const i = new Image();
  i.onload = () => r(i.naturalWidth);
  i.onerror = () => r(0);
  i.src = s;
}))).then(done);
"""

# Where pictures and charts stand, in page coordinates.
BOXES = """
const box = e => { const r = e.getBoundingClientRect();
  return [r.x + scrollX, r.y + scrollY, r.width, r.height]; };
return {charts: [...document.querySelectorAll('figure > svg')].map(box),
        tiles: [...document.querySelectorAll('.tile svg')].map(box)};
"""

# What is cut off: a text that its own box, or one around it, does not show whole.
CLIPPED = """
const out = [];
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('svg') || e.children.length || !e.textContent.trim()) continue;
  const s = getComputedStyle(e);
  if (s.textOverflow == 'ellipsis' || (s.overflow != 'visible' && s.display != 'inline' &&
      (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)))
    out.push(e.textContent.slice(0, 60));
}
for (const t of document.querySelectorAll('figure > svg .label'))
  if (t.textContent.includes('…')) out.push(t.textContent);
return out;
"""

# Sides in pixels of the heads' pictures (the longer one), of the text of charts, and of the frames
# around most-attended patches over those of the patches.
SIZES = """
const tiles = [...document.querySelectorAll('.heads .tile svg, .pair .tile svg')].map(t => {
  const r = t.getBoundingClientRect(), v = t.viewBox.baseVal, f = t.querySelector('rect.top');
  const patch = r.width / v.width;
  return {side: Math.max(r.width, r.height), square: patch / (r.height / v.height),
          inside: f ? f.width.baseVal.value * patch - parseFloat(getComputedStyle(f).strokeWidth) -
                      patch : 0};
});
const texts = [...document.querySelectorAll('figure > svg')].map(s =>
  12 * s.getBoundingClientRect().width / s.viewBox.baseVal.width);
return {tiles: tiles, texts: texts};
"""

# Where the axis of each line chart and its last number end, and where its curves do.
AXES = """
return [...document.querySelectorAll('figure > svg')].map(s => {
  const axis = s.querySelector(':scope > path.axis'), lines = s.querySelectorAll('.line[d*=L], .dot');
  if (!axis || !s.querySelector(':scope > path.grid')) return null;
  const right = e => e.getBBox().x + e.getBBox().width;
  const numbers = [...s.querySelectorAll('text.tick')].filter(
      t => /^[0-9.,]+$/.test(t.textContent) && !t.classList.contains('end') ||
           t.classList.contains('end') && Math.abs(right(t) - right(axis)) < 2);
  const curves = [...lines].map(l => l.matches('circle') ? l.cx.baseVal.value : right(l));
  return {axis: right(axis), number: Math.max(...numbers.map(right)), curve: Math.max(...curves)};
}).filter(a => a);
"""

# How far right the cards of each section reach, and where they could.
FILLED = """
return [...document.querySelectorAll('.cards, .side, .flow')].map(c => {
  const right = Math.max(...[...c.querySelectorAll('figure')].map(
      f => f.getBoundingClientRect().right));
  return [c.getBoundingClientRect().right, right, c.querySelectorAll('figure').length,
          c.className];
});
"""

OVERFLOW = """
const wide = [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg') || e.matches('figure > svg'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.tagName + '.' + e.className);
return [document.documentElement.scrollWidth, innerWidth, wide.slice(0, 5)];
"""

# Charts whose text or marks stick out of their own frame, and texts that overlap one another.
CRAMPED = """
const out = [];
for (const svg of document.querySelectorAll('figure > svg')) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll(':scope > text, :scope > g > text')]
      .map(t => [t.textContent, t.getBoundingClientRect()]);
  for (const [text, r] of texts)
    if (r.left < frame.left - 2 || r.right > frame.right + 2 || r.bottom > frame.bottom + 2)
      out.push('sticks out: ' + text);
  for (let i = 0; i < texts.length; ++i)
    for (let j = i + 1; j < texts.length; ++j) {
      const [a, b] = [texts[i][1], texts[j][1]];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
          Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
        out.push('overlap: ' + texts[i][0] + ' / ' + texts[j][0]);
    }
}
return out;
"""


def requests_of(b):
    """Addresses that the page asked for since the last call, but for data: ones."""
    out = []
    for entry in b.log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            # What the browser's own start page asks for, which may still be loading.
            own = ("chrome:", "chrome-untrusted:")
            if message["params"].get("documentURL", "").startswith(own) or url.startswith(own):
                continue
            if not url.startswith("data:"):
                out.append(url)
    return out


def save(shots, name, png):
    with open(os.path.join(shots, name + ".png"), "wb") as f:
        f.write(png)


def check_layout(b, name, path, width, shots):
    b.resize(width, 900)
    b.open(path)
    scroll, inner, wide = b.run(OVERFLOW)
    check(scroll <= inner and not wide,
          f"{name} at {width} px: {scroll} px wide in {inner}, sticking out: {wide}")
    cramped = b.run(CRAMPED)
    check(not cramped, f"{name} at {width} px: texts {cramped[:4]}")
    clipped = b.run(CLIPPED)
    check(name == "hostile" or not clipped, f"{name} at {width} px: cut off {clipped[:4]}")
    sizes = b.run(SIZES)
    for i, tile in enumerate(sizes["tiles"]):
        check(tile["side"] >= 60, f"{name} at {width} px: tile {i} is {tile['side']:.0f} px")
        check(abs(tile["square"] - 1) < 0.05, f"{name} at {width} px: tile {i} is stretched")
        check(tile["inside"] >= -1, f"{name} at {width} px: frame {i} covers its patch")
    check(all(t >= 9.5 for t in sizes["texts"]),
          f"{name} at {width} px: text of charts of {min(sizes['texts'], default=0):.1f} px")
    for axis in b.run(AXES):
        check(axis["axis"] >= axis["curve"] - 1 and axis["number"] >= axis["curve"] - 4,
              f"{name} at {width} px: an axis ends before its curve: {axis}")
    for limit, right, figures, kind in b.run(FILLED):
        check(right <= limit + 1, f"{name} at {width} px: {kind} sticks out")
        if figures > (5 if "slim" in kind else 1) or width < 500:
            check(right >= limit - 0.05 * width,
                  f"{name} at {width} px: {kind} ends at {right:.0f} of {limit:.0f}")
    boxes = b.run(BOXES)
    check(boxes["charts"] or boxes["tiles"], f"{name}: no charts, no tiles")
    if shots:
        save(shots, f"{name}-{width}", b.screenshot())
    picture = browser.Pixels(b.screenshot(SCALE))
    for kind, floor in (("charts", 8), ("tiles", 3)):
        for i, box in enumerate(boxes[kind]):
            x, y, w, h = (v * SCALE for v in box)
            if y + h > picture.height:
                continue  # below what one screenshot holds
            check(w >= 4 and h >= 4, f"{name} at {width} px: {kind} {i} is {w} × {h} px")
            check(picture.colours(x, y, w, h, floor) >= floor,
                  f"{name} at {width} px: {kind} {i} looks blank")


def check_content(b, name):
    sizes = b.run_async(DECODE)
    check(len(sizes) >= 3 and all(s > 0 for s in sizes), f"{name}: pictures that do not decode")
    check(b.run("return document.scripts.length") == 0, f"{name}: holds a script")
    check(b.run("return document.title") != "broken", f"{name}: a label ran as a script")
    check(b.run("return performance.getEntriesByType('resource').filter("
                "e => !e.name.startsWith('data:')).length") == 0, f"{name}: loads resources")
    downloads = b.run("return [...document.querySelectorAll('figure')].map(f => "
                      "[...f.querySelectorAll('a[download]')].map(a => "
                      "a.download.split('.').pop() + a.protocol).join())")
    check(all(d == "svgdata:,csvdata:" for d in downloads),
          f"{name}: figures without download links")
    lost = b.run("return [...document.querySelectorAll('use')].filter("
                 "u => !document.querySelector(u.getAttribute('href'))).length")
    check(lost == 0, f"{name}: {lost} <use> without a target")
    doubled = b.run("const i = [...document.querySelectorAll('[id]')].map(e => e.id); "
                    "return i.length - new Set(i).size")
    check(doubled == 0, f"{name}: {doubled} doubled ids")
    text = b.run("return document.body.innerText.length")
    check(text > 300, f"{name}: only {text} characters of text")
    # What a download link holds must open by itself.
    for href in b.run("return [...document.querySelectorAll('a[download$=\".svg\"]')]"
                      ".slice(0, 3).map(a => a.href)"):
        width = b.run_async("const done = arguments[1], i = new Image(); i.onload = () => "
                            "done(i.naturalWidth); i.onerror = () => done(0); i.src = arguments[0]",
                            href)
        check(width > 100, f"{name}: a downloaded SVG does not open")


def look_at(b, path, shots):
    name = os.path.basename(path)[:-5]
    requests_of(b)
    b.log("browser")
    b.dark(False)
    for width in (400, 800, 1280):
        check_layout(b, name, path, width, shots)
    check_content(b, name)

    b.open(path)
    with_scripts = b.screenshot()
    b.javascript(False)
    b.open(path)
    check(b.screenshot() == with_scripts, f"{name}: looks different without JavaScript")
    b.javascript(True)

    b.dark(True)
    b.open(path)
    if shots:
        save(shots, f"{name}-dark", b.screenshot())
    ground = browser.Pixels(b.screenshot(0.25)).rows[2][:3]
    check(max(ground) < 60, f"{name}: dark form has a light ground {tuple(ground)}")

    address = "file://" + os.path.abspath(path)
    asked = [u for u in requests_of(b) if u != address]
    check(not asked, f"{name}: requests {asked[:3]}")
    complaints = [e["message"] for e in b.log("browser") if e["level"] in ("SEVERE", "WARNING")]
    check(not complaints, f"{name}: console says {complaints[:3]}")


def main():
    package = browser.missing()
    if package:
        print(f"skipped: the page test needs the Debian package {package}")
        return 77
    shots = os.environ.get("FOCI_SCREENSHOTS")
    with tempfile.TemporaryDirectory() as folder, browser.Browser() as b:
        subprocess.run([a.replace("{}", folder) for a in sys.argv[1:]], check=True,
                       stdout=subprocess.DEVNULL)
        pages = sorted(p for p in os.listdir(folder) if p.endswith(".html"))
        check(pages, f"{folder}: no pages")
        for page in pages:
            size = os.path.getsize(os.path.join(folder, page))
            print(f"{page}: {size} bytes")
            check(size < 2 << 20, f"{page} has {size} bytes")
            look_at(b, os.path.join(folder, page), shots)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
