//! Terminal: a recording as one SVG that plays by itself, without a script: each line appears at its time, and the text
//! moves up when the window is full. Where the reader wants no motion, it shows the end.

use std::fmt::Write as _;

use super::cast::Cast;

/// Pixels of a character and a line, and around the text.
const CHARACTER: f64 = 7.83;
const LINE: usize = 19;
const BORDER: usize = 18;
const BAR: usize = 34;

/// Seconds for which the end stays.
const REST: f64 = 6.0;

/// One line of the terminal: when it appears, and what it is.
struct Shown<'a> {
    at: f64,
    class: &'static str,
    text: &'a str,
}

pub(super) fn svg(cast: &Cast) -> String {
    let lines = lines(cast);
    let total = lines.last().map_or(0.0, |line| line.at) + REST;
    let (width, height) = (cast.head.width as f64 * CHARACTER, cast.head.height * LINE);
    let (whole_width, whole_height) = (width.ceil() as usize + 2 * BORDER, height + BAR + BORDER);
    let percent = |at: f64| format!("{:.2}%", at / total * 100.0);
    let (mut style, mut text) = (String::new(), String::new());
    let mut moves = String::from("0%{transform:none}");
    for (number, line) in lines.iter().enumerate() {
        let at = percent(line.at);
        let _ = write!(
            style,
            "@keyframes l{number}{{0%{{opacity:0}}{at},to{{opacity:1}}}}#l{number}{{animation-name:l{number}}}"
        );
        let y = (number + 1) * LINE;
        let _ =
            writeln!(text, "<text id=\"l{number}\" class=\"{}\" y=\"{y}\">{}</text>", line.class, escaped(line.text));
        if let Some(above) = (number + 1).checked_sub(cast.head.height).filter(|above| *above > 0) {
            let _ = write!(moves, "{at}{{transform:translateY(-{}px)}}", above * LINE);
        }
    }
    let above = (lines.len().saturating_sub(cast.head.height)) * LINE;
    let _ = write!(moves, "to{{transform:translateY(-{above}px)}}");
    let title = escaped(&cast.head.title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {whole_width} {whole_height}\" role=\"img\" aria-label=\"{title}, in a terminal\">\n\
         <style>text{{font:13px ui-monospace,\"DejaVu Sans Mono\",Menlo,Consolas,monospace;white-space:pre;fill:#c9d7df}}\
         .c{{fill:#fff;font-weight:600}}.n{{fill:#6f8a99}}.t{{fill:#8ba0ae;font-family:system-ui,sans-serif;text-anchor:middle}}\
         #all{{transform:translateY(-{above}px)}}\
         @media(prefers-reduced-motion:no-preference){{#all{{animation:up {total:.1}s step-end infinite}}\
         #all text{{animation:{total:.1}s step-end infinite}}\
         @keyframes up{{{moves}}}{style}}}</style>\n\
         <rect width=\"{whole_width}\" height=\"{whole_height}\" rx=\"10\" fill=\"#0b1319\"/>\n\
         <circle cx=\"20\" cy=\"17\" r=\"5\" fill=\"#ff7a70\"/><circle cx=\"37\" cy=\"17\" r=\"5\" fill=\"#e0a646\"/>\
         <circle cx=\"54\" cy=\"17\" r=\"5\" fill=\"#4cc98a\"/>\n\
         <text class=\"t\" x=\"{}\" y=\"21\">{title}</text>\n\
         <svg x=\"{BORDER}\" y=\"{BAR}\" width=\"{}\" height=\"{}\"><g id=\"all\">\n{text}</g></svg>\n</svg>\n",
        whole_width / 2,
        whole_width - 2 * BORDER,
        height + LINE / 3,
    )
}

/// The lines of a recording, those that are too wide broken where the terminal breaks them.
fn lines(cast: &Cast) -> Vec<Shown<'_>> {
    let mut lines = Vec::new();
    for event in &cast.events {
        let whole = event.2.trim_end_matches(['\r', '\n']);
        let class = match whole {
            text if text.starts_with("$ ") => "c",
            text if text.starts_with("# ") => "n",
            _ => "o",
        };
        let mut rest = whole;
        loop {
            let end = rest.char_indices().nth(cast.head.width).map_or(rest.len(), |(at, _)| at);
            let (text, after) = rest.split_at(end);
            lines.push(Shown { at: event.0, class, text });
            if after.is_empty() {
                break;
            }
            rest = after;
        }
    }
    lines
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
