//! Cast: a recording of a terminal, as an asciicast.

use remora_bench::sync::Result;
use serde::{Deserialize, Serialize};

/// A recording: the first line of an asciicast, and its events.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cast {
    pub(super) head: Head,
    pub(super) events: Vec<Event>,
}

/// The head of an asciicast of version 2.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) version: u8,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) title: String,
}

/// Seconds since the beginning, its kind (`o`: output), and what was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Event(pub(super) f64, String, pub(super) String);

impl Cast {
    pub(super) fn parse(text: &str) -> Result<Cast> {
        let mut lines = text.lines();
        let head = serde_json::from_str(lines.next().ok_or("the recording is empty")?)?;
        let events = lines.map(serde_json::from_str).collect::<std::result::Result<_, _>>()?;
        Ok(Cast { head, events })
    }

    pub(super) fn text(&self) -> Result<String> {
        let mut text = serde_json::to_string(&self.head)? + "\n";
        for event in &self.events {
            text += &(serde_json::to_string(event)? + "\n");
        }
        Ok(text)
    }

    /// Adds a line. Times have milliseconds.
    pub(super) fn add(&mut self, at: f64, line: &str) {
        self.events.push(Event((at * 1000.0).round() / 1000.0, "o".into(), format!("{line}\r\n")));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        let head = Head { version: 2, width: 80, height: 24, title: "Five \"minutes\"".into() };
        let mut cast = Cast { head, ..Cast::default() };
        cast.add(0.123_456, "$ remora status");
        cast.add(1.5, "db2  70 %\u{1b}[0m");
        let text = cast.text().unwrap();
        assert_eq!(text.lines().nth(1), Some(r#"[0.123,"o","$ remora status\r\n"]"#));
        assert_eq!(Cast::parse(&text).unwrap(), cast);
    }

    #[test]
    fn what_is_no_recording_is_refused() {
        let head = r#"{"version":2,"width":80,"height":24,"title":"t"}"#;
        assert!(Cast::parse(head).is_ok());
        for wrong in ["", "{}", &format!("{head}\n[0.1]"), &format!("{head}\n\n")] {
            assert!(Cast::parse(wrong).is_err(), "{wrong}");
        }
    }
}
