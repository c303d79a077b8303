//! The manifest of a multi-part append-only file.

use std::fmt;

use crate::text;

/// The files of a data set, in the order in which a server loads them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The base, if there is one, and then the commands since, file by file. Never a file of the history.
    pub files: Vec<NamedFile>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// Its name in the folder of the manifest.
    pub name: String,
    /// Its number among the files of its kind.
    pub number: u64,
    /// What it is.
    pub kind: FileKind,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A snapshot, or commands that make all of the data.
    Base,
    /// Commands since.
    Incremental,
}

/// The text is not a manifest of which a server would load all files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the manifest {what}: {found:?}")]
pub struct ManifestError {
    /// Its number, from 1 on.
    pub line: usize,
    /// What is wrong with it.
    pub what: &'static str,
    /// What stands there.
    pub found: String,
}

/// The most files of a manifest. A server that cannot rewrite makes one every minute at most: this is a month of them.
const FILES_MAX: usize = 50_000;

impl Manifest {
    /// Reads what a server or [`Manifest`]'s text says. Files of the history are left out.
    ///
    /// # Errors
    /// [`ManifestError`]: a server would not load it either, or a name leads out of the folder.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let mut files: Vec<NamedFile> = Vec::new();
        for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
            let error = |what: &'static str| ManifestError { line: number, what, found: text::excerpt(line) };
            let line_text = std::str::from_utf8(line).map_err(|_| error("is not text"))?.trim_end_matches('\r');
            if line_text.is_empty() || line_text.starts_with('#') {
                continue;
            }
            let words = words(line_text).ok_or_else(|| error("has a name in quotes that does not end"))?;
            let value = |name: &str| {
                let pair = words.chunks_exact(2).find(|pair| pair[0].eq_ignore_ascii_case(name));
                pair.map(|pair| pair[1].as_str())
            };
            let name = value("file").filter(|name| !name.is_empty()).ok_or_else(|| error("names no file"))?;
            if name.contains('/') || name == "." || name == ".." || name.contains('\0') {
                return Err(error("names a file outside of its folder"));
            }
            let sequence = value("seq").and_then(|seq| text::decimal_u64(seq.as_bytes()));
            let sequence = sequence.filter(|seq| *seq > 0).ok_or_else(|| error("has no number"))?;
            let kind = match value("type") {
                Some("b") if files.is_empty() => FileKind::Base,
                Some("b") => return Err(error("has a base that is not the first file")),
                Some("i") => FileKind::Incremental,
                Some("h") => continue,
                _ => return Err(error("has no type that is known")),
            };
            let before = files.last().filter(|last| last.kind == FileKind::Incremental);
            if before.is_some_and(|before| sequence <= before.number) {
                return Err(error("is not in the order of the numbers"));
            }
            if files.len() == FILES_MAX {
                return Err(error("is one too many"));
            }
            files.push(NamedFile { name: name.to_owned(), number: sequence, kind });
        }
        Ok(Manifest { files })
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            let kind = if file.kind == FileKind::Base { 'b' } else { 'i' };
            let name = match file.name.contains([' ', '"', '\\']) {
                true => format!("\"{}\"", file.name.replace('\\', "\\\\").replace('"', "\\\"")),
                false => file.name.clone(),
            };
            writeln!(f, "file {name} seq {} type {kind}", file.number)?;
        }
        Ok(())
    }
}

/// The words of a line, which may be in quotes. `None`: a quote does not end.
fn words(line: &str) -> Option<Vec<String>> {
    let (mut words, mut rest) = (Vec::new(), line.trim_start());
    while !rest.is_empty() {
        let mut word = String::new();
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut characters = quoted.char_indices();
            let end = loop {
                match characters.next()? {
                    (at, '"') => break at,
                    (_, '\\') => word.push(characters.next()?.1),
                    (_, other) => word.push(other),
                }
            };
            rest = quoted.get(end + 1..).unwrap_or_default();
        } else {
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            word.push_str(&rest[..end]);
            rest = &rest[end..];
        }
        words.push(word);
        rest = rest.trim_start();
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn file(name: &str, number: u64, kind: FileKind) -> NamedFile {
        NamedFile { name: name.to_owned(), number, kind }
    }

    #[test]
    fn what_servers_write_is_read() {
        let text =
            b"file appendonly.aof.2.base.rdb seq 2 type b\nfile appendonly.aof.1.incr.aof seq 1 type h\r\n# note\n\n\
            file \"my aof.5.incr.aof\" seq 5 type i startoffset 12\nfile a.6 seq 6 type i startoffset 3 endoffset 4\n";
        let wanted = Manifest {
            files: vec![
                file("appendonly.aof.2.base.rdb", 2, FileKind::Base),
                file("my aof.5.incr.aof", 5, FileKind::Incremental),
                file("a.6", 6, FileKind::Incremental),
            ],
        };
        assert_eq!(Manifest::parse(text), Ok(wanted.clone()));
        assert_eq!(Manifest::parse(wanted.to_string().as_bytes()), Ok(wanted));
        assert_eq!(Manifest::parse(b""), Ok(Manifest::default()));
    }

    #[test]
    fn what_no_server_loads_is_an_error_with_its_line() {
        for wrong in [
            "file ../dump.rdb seq 1 type b",
            "file .. seq 1 type b",
            "file a seq 0 type b",
            "file a seq x type i",
            "file a seq 1 type z",
            "file a seq 1",
            "seq 1 type i",
            "file \"a seq 1 type i",
            "file a seq 1 type i\nfile b seq 2 type b",
            "file a seq 2 type i\nfile b seq 2 type i",
            "\u{0}",
        ] {
            let error = Manifest::parse(format!("# first\n{wrong}\n").as_bytes()).unwrap_err();
            assert!(error.line >= 2, "{wrong}: {error}");
        }
        assert!(Manifest::parse(b"file \xFF seq 1 type b").is_err());
        let many: String = (1..=FILES_MAX + 1).map(|number| format!("file a seq {number} type i\n")).collect();
        assert!(Manifest::parse(many.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic_and_what_is_read_survives(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(manifest) = Manifest::parse(&bytes) {
                prop_assert_eq!(Manifest::parse(manifest.to_string().as_bytes()), Ok(manifest));
            }
        }
    }
}
