//! Terminal: a recording as one SVG that plays by itself, without a script: each line appears at its time, and the text
//! moves up when the window is full. Where the reader wants no motion, it shows the end.

use std::fmt::Write as _;

use super::cast::Cast;

/// Pixels of a character and a line, and around the text.
const CHARACTER: f64 = 7.83;
const LINE: usize = 19;
const BORDER: usize = 18;
const BAR: usize = 34;

/// Pixels of a line below its letters' feet: those of the line above the window are not shown.
const BELOW: usize = 5;

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
        let y = (number + 1) * LINE - BELOW;
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
         <svg x=\"{BORDER}\" y=\"{}\" width=\"{}\" height=\"{}\"><g id=\"all\">\n{text}</g></svg>\n</svg>\n",
        whole_width / 2,
        BAR + BELOW,
        whole_width - 2 * BORDER,
        height,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::pictures::cast::Head;

    /// A recording of a terminal of this size, with a line each second.
    fn cast(width: usize, height: usize, lines: &[&str]) -> Cast {
        let mut cast = Cast { head: Head { version: 2, width, height, title: "a & b".into() }, ..Cast::default() };
        for (second, line) in lines.iter().enumerate() {
            cast.add(second as f64, line);
        }
        cast
    }

    #[test]
    fn a_wide_line_is_broken_where_the_terminal_breaks_it() {
        let cast = cast(4, 10, &["12345678", "äöüß5", "", "# a"]);
        let lines = lines(&cast);
        let seen: Vec<(&str, f64)> = lines.iter().map(|line| (line.text, line.at)).collect();
        assert_eq!(seen, [("1234", 0.0), ("5678", 0.0), ("äöüß", 1.0), ("5", 1.0), ("", 2.0), ("# a", 3.0)]);
    }

    #[test]
    fn commands_and_comments_differ_from_output_also_where_they_are_broken() {
        let cast = cast(6, 10, &["$ remora", "# a remark", "#no remark", "output"]);
        let classes: Vec<&str> = lines(&cast).iter().map(|line| line.class).collect();
        assert_eq!(classes, ["c", "c", "n", "n", "o", "o", "o"]);
    }

    #[test]
    fn each_line_appears_at_its_time_and_the_end_stays() {
        let svg = svg(&cast(20, 10, &["one", "two", "three"]));
        // Two seconds, and the rest.
        assert!(svg.contains("animation:8.0s step-end infinite"), "{svg}");
        for (line, at) in [(0, "0.00%"), (1, "12.50%"), (2, "25.00%")] {
            let appears = format!("@keyframes l{line}{{0%{{opacity:0}}{at},to{{opacity:1}}}}#l{line}{{");
            assert!(svg.contains(&appears), "{appears}: {svg}");
        }
        assert!(svg.contains("@keyframes up{0%{transform:none}to{transform:translateY(-0px)}}"), "{svg}");
    }

    #[test]
    fn text_moves_up_when_the_window_is_full_and_without_motion_its_end_is_shown() {
        let svg = svg(&cast(20, 2, &["one", "two", "three", "four"]));
        let (third, fourth) = (LINE, 2 * LINE);
        assert!(svg.contains(&format!("{{transform:translateY(-{third}px)}}")), "{svg}");
        let still = format!("#all{{transform:translateY(-{fourth}px)}}@media(prefers-reduced-motion:no-preference)");
        assert!(svg.contains(&still), "{svg}");
    }

    #[test]
    fn the_window_shows_whole_lines() {
        let svg = svg(&cast(20, 2, &["one", "two", "three"]));
        assert!(svg.contains(&format!("height=\"{}\"><g id=\"all\">", 2 * LINE)), "{svg}");
        // After a move by one line, the feet of the first line are above the window, and those of the third are in it.
        for (line, text) in ["one", "two", "three"].into_iter().enumerate() {
            let y = (line + 1) * LINE - BELOW;
            assert!(svg.contains(&format!("y=\"{y}\">{text}<")), "{svg}");
        }
    }

    #[test]
    fn signs_of_the_drawing_s_own_language_are_only_text() {
        let svg = svg(&cast(60, 10, &["$ cat <file> && echo \"</text><script>\""]));
        assert!(
            svg.contains("$ cat &lt;file&gt; &amp;&amp; echo &quot;&lt;/text&gt;&lt;script&gt;&quot;</text>"),
            "{svg}"
        );
        assert!(svg.contains("aria-label=\"a &amp; b, in a terminal\"") && !svg.contains("<script"), "{svg}");
    }

    #[test]
    fn a_recording_without_lines_is_an_empty_window() {
        let svg = svg(&cast(20, 10, &[]));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }
}
