//! Slots that a server in cluster mode imports while a snapshot is taken.
//!
//! Valkey 9 moves slots as a whole (`CLUSTER MIGRATESLOTS`). A snapshot from the time of an import holds keys that do
//! not belong to the server yet, and an opcode that only servers in cluster mode load. No such snapshot is used: none
//! is requested during an import, and one is thrown away if an import has begun before the server forked. An import
//! that begins later is in the stream, and replicas follow it.

use std::collections::BTreeSet;

use remora_redis::resp::Frame;

use super::Capture;
use super::plan::CaptureError;
use crate::server::{Client, ServerError};

const COMMAND: [&str; 2] = ["CLUSTER", "GETSLOTMIGRATIONS"];

/// The states of an import that is over.
const OVER: [&[u8]; 3] = [b"success", b"failed", b"cancelled"];

/// An import, as the server lists it.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    name: Vec<u8>,
    slots: String,
    is_over: bool,
}

impl Capture {
    /// The capture, for a server that imports no slots now. It knows which imports are over.
    pub(super) fn without_imports(&self) -> Result<Capture, CaptureError> {
        let mut over = BTreeSet::new();
        for import in self.imports()? {
            if !import.is_over {
                return Err(CaptureError::ImportsSlots { slots: import.slots });
            }
            over.insert(import.name);
        }
        Ok(Capture { imports_over: over, ..self.clone() })
    }

    /// Fails if the server may have been importing slots when it forked. Called after it has forked.
    pub(super) fn check_imports(&self) -> Result<(), CaptureError> {
        match self.imports()?.into_iter().find(|import| !self.imports_over.contains(&import.name)) {
            Some(import) => Err(CaptureError::ImportsSlots { slots: import.slots }),
            None => Ok(()),
        }
    }

    fn imports(&self) -> Result<Vec<Import>, CaptureError> {
        if !self.plan.may_import_slots {
            return Ok(Vec::new());
        }
        self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            read(&mut client).await
        })
    }
}

async fn read(client: &mut Client) -> Result<Vec<Import>, ServerError> {
    let answer = client.command(&COMMAND).await?;
    parse(&answer).ok_or_else(|| client.unexpected(&COMMAND.join(" "), &answer))
}

/// The imports in the server's answer: a list of jobs, and each of them a list of names and values. `None` if it is
/// anything else.
fn parse(answer: &Frame) -> Option<Vec<Import>> {
    let Frame::Array(jobs) = answer else { return None };
    let mut imports = Vec::new();
    for job in jobs {
        let Frame::Array(fields) = job else { return None };
        let field = |wanted: &str| {
            fields.chunks_exact(2).find_map(|pair| match pair {
                [name, value] if name.as_bytes() == Some(wanted.as_bytes()) => value.as_bytes(),
                _ => None,
            })
        };
        if field("operation")? == b"IMPORT" {
            imports.push(Import {
                name: field("name")?.to_vec(),
                slots: String::from_utf8_lossy(field("slot_ranges")?).into_owned(),
                is_over: OVER.contains(&field("state")?),
            });
        }
    }
    Some(imports)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn job(fields: &[(&str, &str)]) -> Frame {
        let bulk = |text: &str| Frame::Bulk(text.into());
        Frame::Array(fields.iter().flat_map(|(name, value)| [bulk(name), bulk(value)]).collect())
    }

    fn named(name: &str, operation: &str, state: &str) -> Frame {
        job(&[("name", name), ("operation", operation), ("slot_ranges", "0-8000 9000"), ("state", state)])
    }

    #[test]
    fn imports_and_their_ends_are_read_and_exports_are_not() {
        let jobs = [
            named("a", "EXPORT", "snapshotting"),
            named("b", "IMPORT", "receiving-snapshot"),
            named("c", "IMPORT", "success"),
            named("d", "IMPORT", "a state of a later server"),
        ];
        let read = parse(&Frame::Array(jobs.into())).unwrap();
        let seen: Vec<_> = read.iter().map(|import| (import.name.as_slice(), import.is_over)).collect();
        assert_eq!(seen, [(b"b".as_slice(), false), (b"c", true), (b"d", false)]);
        assert_eq!(read[0].slots, "0-8000 9000");
    }

    #[test]
    fn another_answer_is_not_taken_for_a_list_without_imports() {
        assert_eq!(parse(&Frame::Array(Vec::new())), Some(Vec::new()));
        let wrong =
            [Frame::Integer(1), Frame::Array(vec![Frame::Integer(1)]), Frame::Array(vec![job(&[("name", "a")])])];
        for wrong in wrong {
            assert_eq!(parse(&wrong), None, "{wrong:?}");
        }
    }
}
