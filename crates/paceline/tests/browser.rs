//! Reports in a real browser: a headless Chromium opens the pages, a script in a copy of them clicks as a
//! person would, and the test examines the pixels of screenshots.
//!
//! Without Chromium, the test prints that and passes. Screenshots stay in `target/tmp`.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::traces::{Training, write_traces};
use common::{Run, Sandbox, TINY_MLP};
use serde_json::Value;

/// Width of the window.
const WIDTH: u32 = 1300;

/// What a person would do, and what they would see. Runs in a copy of the page.
const VISITOR: &str = r##"<script>
addEventListener("load", () => setTimeout(() => {
  const box = (element) => {
    const { left, top, width, height } = element.getBoundingClientRect();
    return [left + scrollX, top + scrollY, width, height].map(Math.round);
  };
  const panels = [...document.querySelectorAll(".panel")].map((panel) => ({
    id: panel.id,
    box: box(panel),
    drawing: panel.querySelector("svg") ? box(panel.querySelector("svg")) : null,
    hover: panel.querySelector("figcaption").title,
  }));
  const table = document.querySelector("#TABLE table");
  const heads = [...table.tHead.rows[0].cells];
  const values = () => [...table.tBodies[0].rows].map((row) =>
    [...row.cells].map((cell) => cell.dataset.v ?? cell.textContent));
  const found = { height: document.documentElement.scrollHeight, panels,
    keys: heads.map((head) => head.dataset.key), hovers: heads.map((head) => head.title),
    rows: values(), orders: [] };
  const head = heads.find((head) => head.dataset.key === "KEY");
  for (let click = 0; click < 2; click++) {
    head.querySelector("button").click();
    const at = heads.indexOf(head);
    found.orders.push([head.getAttribute("aria-sort"), values().map((row) => row[at])]);
  }
  const number = table.tBodies[0].querySelector(".n");
  // The browser's own clipboard answers from another process, at a time that nobody can say.
  const writeText = async (text) => { found.copied = text; };
  Object.defineProperty(navigator, "clipboard", { value: { writeText } });
  number.click();
  found.number = number.dataset.v;
  const paper = () => getComputedStyle(document.body).backgroundColor;
  found.light = paper();
  document.getElementById("face").click();
  found.dark = paper();
  setTimeout(() => {
    found.said = document.getElementById("said").textContent;
    const out = document.createElement("script");
    out.id = "found";
    out.type = "application/json";
    out.textContent = JSON.stringify(found).replaceAll("<", "\\u003c");
    document.body.append(out);
  }, 200);
}, 0));
</script></body>"##;

/// Width of a phone.
const NARROW: u32 = 400;

/// What a person sees on a phone. Runs in a copy of the page, in a frame of that width.
const PHONE: &str = r##"<script>
addEventListener("load", () => setTimeout(() => {
  const isShown = (element) => element.getClientRects().length > 0;
  const letters = (svg) => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return [...svg.querySelectorAll("text")].map((text) => scale * text.getAttribute("font-size"));
  };
  const charts = [...document.querySelectorAll(".chart")].map((chart) => {
    const shown = [...chart.querySelectorAll("svg")].filter(isShown);
    return { id: chart.closest(".panel").id, shown: shown.length, room: chart.clientWidth,
      width: Math.max(...shown.map((svg) => svg.getBoundingClientRect().width)),
      letters: Math.min(...shown.flatMap(letters)) };
  });
  const tables = [...document.querySelectorAll(".scroll")].map((scroll) => {
    const wide = scroll.parentElement;
    const found = { id: scroll.closest(".panel").id, right: wide.getBoundingClientRect().right,
      inside: scroll.scrollWidth - scroll.clientWidth, shadow: wide.classList.contains("after"),
      line: isShown(wide.previousElementSibling) };
    scroll.scrollLeft = 40;
    return { ...found, scrolled: scroll.scrollLeft };
  });
  const shape = [...document.querySelectorAll(".chart svg g > rect")].find(isShown);
  shape.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const found = { width: innerWidth, page: document.scrollingElement.scrollWidth, charts, tables,
    hover: shape.parentElement.querySelector("title").textContent,
    said: document.getElementById("said").textContent };
  const out = parent.document.createElement("script");
  out.id = "found";
  out.type = "application/json";
  out.textContent = JSON.stringify(found).replaceAll("<", "\\u003c");
  parent.document.body.append(out);
}, 200));
</script></body>"##;

/// The browser, or `None` after printing that there is none.
fn browser() -> Option<&'static str> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let starts = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let found = names.into_iter().find(starts);
    if found.is_none() {
        println!("skipped: there is no {} here", names.join(", "));
    }
    found
}

struct Visit<'a> {
    browser: &'a str,
    sandbox: &'a Sandbox,
}

impl Visit<'_> {
    fn run(&self, page: &Path, flags: &[String]) -> Run {
        let mut command = Command::new(self.browser);
        command
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args(["--disable-dev-shm-usage", "--no-first-run", "--virtual-time-budget=5000"])
            .arg(format!("--user-data-dir={}", self.sandbox.path("browser").display()))
            .args(flags)
            .arg(format!("file://{}", page.display()));
        Run::of(command).ok()
    }

    /// What the visitor found on the page.
    fn find(&self, page: &Path, table: &str, key: &str) -> Value {
        let text = fs::read_to_string(page).unwrap();
        let script = VISITOR.replace("TABLE", table).replace("KEY", key);
        self.found_on(&page.with_extension("visited.html"), &text.replace("</body>", &script))
    }

    /// What a person with a phone found on the page. A window has a least width, a frame has none.
    fn find_on_phone(&self, page: &Path) -> Value {
        let text = fs::read_to_string(page).unwrap().replace("</body>", PHONE);
        let text = text.replace('&', "&amp;").replace('"', "&quot;");
        let frame = format!(
            "<!doctype html><body style=\"margin:0\"><iframe style=\"border:0\" width=\"{NARROW}\" \
             height=\"800\" srcdoc=\"{text}\"></iframe></body>"
        );
        self.found_on(&page.with_extension("phone.html"), &frame)
    }

    /// Opens a page, and returns what its script has found.
    fn found_on(&self, copy: &Path, text: &str) -> Value {
        fs::write(copy, text).unwrap();
        let flags = [format!("--window-size={WIDTH},1000"), "--dump-dom".to_owned()];
        let dom = self.run(copy, &flags).stdout;
        let begin = r#"<script id="found" type="application/json">"#;
        let found =
            dom.split_once(begin).unwrap_or_else(|| panic!("the script has not run: {dom}")).1;
        serde_json::from_str(found.split_once("</script>").unwrap().0).unwrap()
    }

    /// A picture of the whole page.
    fn picture(&self, page: &Path, face: &str, height: u64, to: &Path) -> Picture {
        let text = fs::read_to_string(page).unwrap();
        let copy = page.with_extension(format!("{face}.html"));
        let root = format!("<html data-face=\"{face}\"");
        fs::write(&copy, text.replacen("<html", &root, 1)).unwrap();
        // Never look at a picture of an earlier run.
        if to.exists() {
            fs::remove_file(to).unwrap();
        }
        let flags =
            [format!("--window-size={WIDTH},{height}"), format!("--screenshot={}", to.display())];
        self.run(&copy, &flags);
        Picture::read(to)
    }
}

/// Pixels of a screenshot.
struct Picture {
    width: usize,
    height: usize,
    channels: usize,
    bytes: Vec<u8>,
}

impl Picture {
    fn read(path: &Path) -> Self {
        let file = std::io::BufReader::new(fs::File::open(path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        let (width, height) = (info.width as usize, info.height as usize);
        Self { width, height, channels: info.color_type.samples(), bytes }
    }

    fn pixel(&self, x: usize, y: usize) -> [u8; 3] {
        let at = (y * self.width + x) * self.channels;
        [self.bytes[at], self.bytes[at + 1], self.bytes[at + 2]]
    }

    /// How many pixels of a box differ clearly from its corner, and how many of them are colored.
    fn ink(&self, of: &Value) -> (usize, usize) {
        let [x, y, width, height] = [0, 1, 2, 3].map(|at| of[at].as_u64().unwrap() as usize);
        // Within the border, whose corners are round.
        let paper = self.pixel(x + 6, y + 6);
        let (mut ink, mut colorful) = (0, 0);
        // Most of some million pixels are paper, and nothing here is optimized.
        for y in y + 6..(y + height - 6).min(self.height) {
            for x in x + 6..(x + width - 6).min(self.width) {
                let [r, g, b] = self.pixel(x, y);
                if [r, g, b] == paper {
                    continue;
                }
                let is_far = |a: u8, b: u8| a.abs_diff(b) > 60;
                ink +=
                    usize::from(is_far(r, paper[0]) || is_far(g, paper[1]) || is_far(b, paper[2]));
                colorful += usize::from(is_far(r, g) || is_far(g, b) || is_far(b, r));
            }
        }
        (ink, colorful)
    }
}

/// Checks a page on a phone: only tables are wider than their box, and say so.
fn visit_on_phone(visit: &Visit<'_>, page: &Path) {
    let found = visit.find_on_phone(page);
    let number =
        |of: &Value, key: &str| of[key].as_f64().unwrap_or_else(|| panic!("{key} in {of}"));
    assert_eq!(found["width"], NARROW);
    assert!(number(&found, "page") <= f64::from(NARROW), "the page scrolls sideways: {found}");
    let charts = found["charts"].as_array().unwrap();
    assert!(!charts.is_empty(), "{found}");
    for chart in charts {
        assert_eq!(chart["shown"], 1, "{chart}");
        assert!(number(chart, "width") <= number(chart, "room"), "{chart}");
        assert!(number(chart, "letters") >= 10.0, "the text is too small to read: {chart}");
    }
    let mut num_wide = 0;
    for table in found["tables"].as_array().unwrap() {
        assert!(number(table, "right") <= f64::from(NARROW), "{table}");
        let is_wide = number(table, "inside") > 1.0;
        assert_eq!(
            (&table["line"], &table["shadow"]),
            (&is_wide.into(), &is_wide.into()),
            "{table}"
        );
        assert_eq!(number(table, "scrolled") > 0.0, is_wide, "{table}");
        num_wide += usize::from(is_wide);
    }
    assert!(num_wide > 0, "no table is wider than a phone: {found}");
    assert!(!found["said"].as_str().unwrap().is_empty(), "a click says nothing: {found}");
    assert_eq!(found["said"], found["hover"]);
}

/// Opens the page and checks everything on it. Returns the names of its panels.
fn visit(
    visit: &Visit<'_>,
    page: &Path,
    csv: &str,
    table: &str,
    key: &str,
    name: &str,
) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    assert!(text.len() < 2_000_000, "{} bytes", text.len());
    for foreign in ["http:", "https:", "src=", "url(", "@import", "<link", "<iframe"] {
        assert!(!text.contains(foreign), "{name} asks for something: {foreign}");
    }
    visit_on_phone(visit, page);
    let found = visit.find(page, table, key);

    // The table holds the numbers of the CSV, all digits of them.
    let mut lines = csv.lines().map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(words(&found["keys"]), lines.next().unwrap());
    let rows: Vec<Vec<String>> = found["rows"].as_array().unwrap().iter().map(words).collect();
    assert_eq!(rows, lines.collect::<Vec<_>>());
    assert!(words(&found["hovers"]).iter().all(|hover| !hover.is_empty()));

    // A click sorts, a second one reverses the order, a number is copied, and the theme changes.
    let numbers = |at: usize| -> Vec<f64> {
        words(&found["orders"][at][1]).iter().map(|word| word.parse().unwrap()).collect()
    };
    assert_eq!(
        (&found["orders"][0][0], &found["orders"][1][0]),
        (&"descending".into(), &"ascending".into())
    );
    assert!(numbers(0).is_sorted_by(|a, b| a >= b), "{:?}", numbers(0));
    assert!(numbers(1).is_sorted_by(|a, b| a <= b), "{:?}", numbers(1));
    assert_ne!(numbers(0), numbers(1));
    assert_eq!(found["copied"], found["number"]);
    assert_eq!(found["said"], format!("Copied {}", found["number"].as_str().unwrap()));
    assert_ne!(found["light"], found["dark"]);

    // No panel is empty and every chart has colors, on a light and on a dark background.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser");
    fs::create_dir_all(&folder).unwrap();
    let panels = found["panels"].as_array().unwrap();
    let height = found["height"].as_u64().unwrap();
    for face in ["light", "dark"] {
        let file = folder.join(format!("{name}-{face}.png"));
        let picture = visit.picture(page, face, height, &file);
        println!("a picture of the report: {}", file.display());
        assert_eq!((picture.width, picture.height), (WIDTH as usize, height as usize));
        for panel in panels {
            let (ink, _) = picture.ink(&panel["box"]);
            assert!(ink > 300, "{face}: {} has {ink} pixels of ink", panel["id"]);
            if !panel["drawing"].is_null() {
                let (_, colorful) = picture.ink(&panel["drawing"]);
                assert!(colorful > 300, "{face}: {} has {colorful} pixels of color", panel["id"]);
            }
        }
    }
    panels.iter().map(|panel| panel["id"].as_str().unwrap().to_owned()).collect()
}

fn analyze(sandbox: &Sandbox, args: &str) {
    sandbox.run(&format!("analyze {args}")).ok();
}

fn report(sandbox: &Sandbox, folder: &str, name: &str) -> (PathBuf, String) {
    let folder = sandbox.path(folder);
    let csv = fs::read_to_string(folder.join(format!("{name}.csv"))).unwrap();
    (folder.join(format!("{name}.html")), csv)
}

#[test]
fn a_report_of_a_data_parallel_run() {
    let Some(browser) = browser() else { return };
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 4, Training::Ddp);
    analyze(&sandbox, "profile/ddp");
    let (page, csv) = report(&sandbox, "reports/ddp", "summary");
    let visitor = Visit { browser, sandbox: &sandbox };
    let panels = visit(&visitor, &page, &csv, "summary", "all_reduce_time_us", "ddp");
    for panel in [
        "all-reduce-time-ms",
        "comm-comp-overlap-pctg",
        "comm-overhead-pctg",
        "compute-time-ms",
        "compute-time-pctg",
        "all-reduce-calls",
        "temporal",
        "longest",
        "kinds",
        "anatomy",
        "path",
        "stragglers",
        "idle",
        "launches",
        "queues",
        "copies",
        "critical-path",
        "memory",
    ] {
        assert!(panels.iter().any(|of| of == panel), "no {panel} in {panels:?}");
    }
}

#[test]
fn a_report_of_a_sharded_run() {
    let Some(browser) = browser() else { return };
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/zero", 2, Training::Sharding);
    analyze(&sandbox, "profile/zero");
    let (page, csv) = report(&sandbox, "reports_sharding/zero", "summary");
    let visitor = Visit { browser, sandbox: &sandbox };
    let panels = visit(&visitor, &page, &csv, "summary", "reduce_scatter_time_us", "sharding");
    for panel in ["peak-memory", "steady-memory", "collectives", "temporal"] {
        assert!(panels.iter().any(|of| of == panel), "no {panel} in {panels:?}");
    }
}

#[test]
fn a_comparison_on_a_phone() {
    let Some(browser) = browser() else { return };
    let sandbox = Sandbox::new();
    for strategy in ["ddp", "simple_ddp"] {
        sandbox.train(&format!("{TINY_MLP} --nproc 1 --warmup-steps 1 --strategy {strategy}")).ok();
    }
    sandbox.run("compare runs").ok();
    visit_on_phone(
        &Visit { browser, sandbox: &sandbox },
        &sandbox.path("reports/compare/compare.html"),
    );
}

#[test]
fn a_report_of_a_difference() {
    let Some(browser) = browser() else { return };
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 1, Training::Ddp);
    write_traces(&sandbox, "profile/zero", 1, Training::Sharding);
    analyze(&sandbox, "profile/ddp --against profile/zero");
    let (page, csv) = report(&sandbox, "reports/against/ddp-zero", "against");
    let visitor = Visit { browser, sandbox: &sandbox };
    visit(&visitor, &page, &csv, "diff", "difference_ms", "diff");
}
