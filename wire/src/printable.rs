//! Printable: text from a peer that is safe to show on a terminal and in a log.
//!
//! A control character in a replica's name could move the cursor, hide a line, or begin a line that looks like another
//! program's. Directional controls can make a line read differently from what it says.

use std::borrow::Cow;

/// The character that stands for one that is not printed.
const REPLACEMENT: char = '?';

/// Whether a terminal shows this character as itself, in its place.
pub fn is_printable(character: char) -> bool {
    !character.is_control()
        && !matches!(
            character,
            '\u{61c}' // Arabic letter mark
            | '\u{200b}'..='\u{200f}' // no width, and directional marks
            | '\u{2028}'..='\u{202e}' // line and paragraph separators, embeddings and overrides
            | '\u{2060}'..='\u{206f}' // no width, and directional isolates
            | '\u{feff}' // byte order mark
            | '\u{fff9}'..='\u{fffb}' // interlinear annotations
            | '\u{e0000}'..='\u{e007f}' // tags
        )
}

/// The text with a question mark for each character that is not printable. Never longer than `text`.
pub fn printable(text: &str) -> Cow<'_, str> {
    match text.chars().all(is_printable) {
        true => Cow::Borrowed(text),
        false => text.chars().map(|character| if is_printable(character) { character } else { REPLACEMENT }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_replaced() {
        let hostile = "evil\u{1b}]0;title\u{7}\u{1b}[31m\n2026-01-01 INFO forged\u{85}\u{2028}\u{202e}\u{2066}\u{feff}";
        assert_eq!(printable(hostile), "evil?]0;title??[31m?2026-01-01 INFO forged?????");
        assert!(printable(hostile).len() <= hostile.len());
    }

    #[test]
    fn text_in_any_script_stays_as_it_is() {
        for text in ["db-1.example:6379", "réplique", "副本", "реплика", "🦈 1", ""] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        }
    }
}
