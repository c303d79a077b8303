//! The report's charts, as a browser draws them: a chart that cannot be read is found by where its parts are and by
//! their colours, and not by comparing pictures, which differ with each machine's fonts.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use remora_bench::Spread;
use remora_bench::bars::{Bar, Chart, Family, Group};
use remora_lab::browser::{Browser, View};
use remora_lab::{require, server};
use serde_json::Value;

/// The size of a window; the page is as long as its charts are, and what is measured does not depend on it.
const LIGHT: View = View { width: 1000, height: 800, is_dark: false };

/// How long a browser may take to lay out the page.
const LONG: Duration = Duration::from_secs(60);

/// What ends the page, so that all charts are there when it is.
const END: &str = "all charts are above";

/// What is wrong with the charts of the page: `[name of the file, fault]`. A chart is a shadow tree of its own, so that
/// its style is for its own parts.
const FAULTS: &str = r#"(() => {
    const faults = [];
    // From WCAG 2: the luminance of a colour, and the contrast of two.
    const light = (colour) => {
        const parts = colour.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, other) => {
        const [less, more] = [light(one), light(other)].sort((a, b) => a - b);
        return (more + 0.05) / (less + 0.05);
    };
    for (const host of document.querySelectorAll('div[data-name]')) {
        const svg = host.shadowRoot.querySelector('svg');
        const say = (fault) => faults.push([host.dataset.name, fault]);
        const frame = svg.getBoundingClientRect();
        const all = (what) => [...svg.querySelectorAll(what)].map((node) => ({
            node, is: node.textContent.trim() || node.getAttribute('class'), box: node.getBoundingClientRect(),
        }));
        // Labels that an axis leaves out have no words.
        const [texts, bars, whiskers] = [all('text').filter((text) => text.is), all('.own, .ours, .other'), all('line.whisker')];
        if (texts.length < 3) say('fewer than three texts');
        for (const { is, box } of [...texts, ...bars]) {
            if (box.width <= 0 || box.height <= 0) say(`not drawn: ${is}`);
            const across = box.left >= frame.left && box.right <= frame.right;
            if (!across || box.top < frame.top || box.bottom > frame.bottom) say(`beyond the frame: ${is}`);
        }
        // A pixel at each side belongs to no letter.
        const meet = (one, other) => one.left + 1 < other.right - 1 && other.left + 1 < one.right - 1
            && one.top + 1 < other.bottom - 1 && other.top + 1 < one.bottom - 1;
        texts.forEach((one, place) => {
            for (const other of texts.slice(place + 1)) {
                const same = one.is === other.is && one.box.x === other.box.x && one.box.y === other.box.y;
                if (!same && meet(one.box, other.box)) say(`over one another: ${one.is} | ${other.is}`);
            }
            for (const other of [...bars, ...whiskers]) {
                if (meet(one.box, other.box)) say(`over a bar: ${one.is}`);
            }
        });
        const page = svg.querySelector('.page');
        const ground = page ? getComputedStyle(page).fill : 'rgb(255, 255, 255)';
        for (const [parts, least] of [[texts, 4.5], [bars, 3]]) {
            for (const { node, is } of parts) {
                const colour = getComputedStyle(node).fill;
                if (contrast(colour, ground) < least) say(`${colour} on ${ground}: ${is}`);
            }
        }
    }
    return faults;
})()"#;

/// The faults of these charts, `name: fault`, in the order of light and dark.
fn faults(charts: &[(String, String)]) -> [Vec<String>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let mut page = String::from("<!DOCTYPE html><meta charset=\"utf-8\"><title>charts</title>");
    for (name, svg) in charts {
        let svg = svg.trim_start_matches(|letter| letter != '<');
        let _ = write!(page, "<div data-name=\"{name}\"><template shadowrootmode=\"open\">{svg}</template></div>");
    }
    let path = folder.path().join("charts.html");
    fs::write(&path, format!("{page}<p>{END}</p>")).unwrap();
    let mut browser = Browser::open(&format!("file://{}", path.display()), LIGHT).unwrap();
    browser.wait_for_text("the charts", LONG, |text| text.contains(END)).unwrap();
    let mut found = [false, true].map(|is_dark| {
        browser.resize(View { is_dark, ..LIGHT }).unwrap();
        let found: Vec<(String, String)> = serde_json::from_value(browser.evaluate(FAULTS).unwrap()).unwrap();
        found.into_iter().map(|(name, fault)| format!("{name}: {fault}")).collect::<Vec<_>>()
    });
    let drawn = browser.evaluate("document.querySelectorAll('div[data-name]').length").unwrap();
    assert_eq!(drawn, Value::from(charts.len()));
    let complaints = browser.complaints().unwrap();
    found[0].extend(complaints.into_iter().map(|complaint| format!("the browser: {complaint}")));
    found
}

/// The charts that `remora-bench report` draws from the kept runs.
fn of_the_report(folder: &Path) -> Vec<(String, String)> {
    let root = server::project_root();
    let copy = |from: &str| {
        let to = folder.join(Path::new(from).file_name().unwrap());
        fs::copy(root.join(from), &to).unwrap();
        to
    };
    let (page, measured, plots) = (copy("bench/report.md"), copy("docs/measured.md"), folder.join("plots"));
    let mut report = Command::new(env!("CARGO_BIN_EXE_remora-bench"));
    report.arg("report").arg("--runs").arg(root.join("bench/runs"));
    report.arg("--page").arg(page).arg("--measured").arg(measured).arg("--plots").arg(&plots);
    let ran = report.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let mut paths: Vec<PathBuf> = fs::read_dir(&plots).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    paths.iter().map(read).collect()
}

#[test]
#[ignore = "long: needs a browser"]
fn every_chart_of_the_report_can_be_read_in_light_and_dark() {
    let Some(()) = require::browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    let charts = of_the_report(folder.path());
    for kind in ["sync-", "feel-", "volume-", "headline"] {
        assert!(charts.iter().any(|(name, _)| name.starts_with(kind)), "no chart is named {kind}…");
    }
    let none: [Vec<String>; 2] = [Vec::new(), Vec::new()];
    assert_eq!(faults(&charts), none);
}

fn chart(name: &str, note: &str) -> (String, String) {
    let bar = |name: &str, family, median: f64, note: &str| {
        let figure = Spread { median, low: median * 0.9, high: median * 1.1 };
        Bar { name: name.to_owned(), family, figure, note: note.to_owned() }
    };
    let bars = vec![bar("replication, tuned", Family::Own, 8.0, "1.00"), bar(name, Family::Ours, 7.9, note)];
    let groups = vec![Group { title: "3 replicas".into(), bars }];
    let chart = Chart { title: "Seconds".into(), unit: "s", notes: "ratio", groups };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chart.svg");
    chart.draw(&path).unwrap();
    (name.to_owned(), fs::read_to_string(path).unwrap())
}

#[test]
#[ignore = "long: needs a browser"]
fn a_broken_chart_is_found() {
    let Some(()) = require::browser() else { return };
    let (long, wide) = ("n".repeat(160), "W".repeat(40));
    let long = long.as_str();
    let whole = chart("whole", "0.99");
    assert_eq!(faults(std::slice::from_ref(&whole)), [Vec::<String>::new(), Vec::new()]);
    // Black letters in the dark, as if that half of the style were missing.
    let dim = ("dim".to_owned(), whole.1.replace("text{fill:#e6edf3}", ""));
    assert_ne!(dim.1, whole.1);
    let charts = [chart(long, "0.99"), chart("wide", &wide), dim, ("none".to_owned(), "<svg><rect/></svg>".to_owned())];
    let [light, dark] = faults(&charts);
    let has = |faults: &[String], name: &str, fault: &str| {
        faults.iter().any(|found| found.starts_with(&format!("{name}: {fault}")))
    };
    for found in [&light, &dark] {
        assert!(has(found, long, "beyond the frame: "), "{found:?}");
        assert!(has(found, "wide", "over one another: ") && has(found, "wide", "over a bar: "), "{found:?}");
        assert!(has(found, "none", "fewer than three texts"), "{found:?}");
    }
    assert!(!has(&light, "dim", "") && has(&dark, "dim", "rgb(31, 35, 40) on rgb(13, 17, 23)"), "{light:?} {dark:?}");
}
