//! Rest: what the server saves behind the strings that its child has written into our table, joined to them.
//!
//! Both are snapshots of their own kind; a snapshot may say its fields, its databases and their sizes as often as it likes, so that one is
//! made of them by leaving out what may stand there only once:
//!
//! ```text
//!   the child's   REDIS0011 fields │ database, long strings … │
//!   the server's  ─────────         fields, functions, database, everything else … FF  ────────   ────
//!                 magic: left out                                                      checksum    mark
//!                                                                                      → zeros     left out
//! ```
//!
//! The checksum is of the server's bytes alone; zeros say that there is none. The table has one for each slot. Not here: how the server
//! came to leave the strings out ([`super::with_module`]).

use std::sync::atomic::Ordering;
use std::time::Instant;

use remora_redis::psync::Payload;
use remora_redis::psync::client::EofMark;
use remora_redis::rdb::{Head, OPCODE_EOF, magic};
use remora_table::SnapshotWriter;
use remora_table::server_pages::capture_page::WriterStatus;

use super::plan::{Fault, Plan};
use super::psync_link::came;
use super::snapshot::{MARK_LENGTH, Taking, pause_after};
use super::socket::Wire;

/// What the server's part must be like.
pub(super) struct Expected {
    /// How it comes.
    pub(super) payload: Payload,
    /// What the child has written.
    pub(super) told: WriterStatus,
    /// The database in which the child said that the stream begins, where that counts. A primary's stream begins by selecting one; a replica
    /// forwards its primary's stream unchanged.
    pub(super) database: Option<u32>,
}

/// Takes the payload, and completes the snapshot with it.
pub(super) fn receive(plan: &Plan, wire: &mut Wire, expected: &Expected, early: &[u8]) -> Result<(), Fault> {
    let (memory, geometry) = &plan.snapshot;
    let writer = SnapshotWriter::resume(memory.clone(), *geometry, expected.told.received)?;
    let mut taking = Taking::new(plan, writer);
    pour(plan, wire, expected, early, &mut taking)?;
    taking.complete(0)
}

fn pour(plan: &Plan, wire: &mut Wire, expected: &Expected, early: &[u8], taking: &mut Taking<'_>) -> Result<(), Fault> {
    let Payload::Mark(mark) = expected.payload else {
        return Err(Fault::Module("the server sent its part from a file, which others may have as well".into()));
    };
    let mut joint = Joint::new(mark, expected);
    let mut buffer = vec![0; READ_BYTES];
    let mut heard = Instant::now();
    let mut whole = joint.take(early)?;
    taking.append(joint.ready())?;
    joint.taken();
    while !whole {
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped);
        }
        let Some(n) = came(wire.read(&mut buffer), heard, "snapshot")? else { continue };
        whole = joint.take(&buffer[..n])?;
        taking.append(joint.ready())?;
        joint.taken();
        heard = Instant::now();
        if !whole {
            pause_after(n);
        }
    }
    taking.append(&joint.end()?)
}

/// Bytes of one read: they are copied once more from there, hence no more than a second-level cache holds.
const READ_BYTES: usize = 256 << 10;

/// The seam, byte by byte. Pure.
struct Joint {
    mark: EofMark,
    /// The magic that both must have.
    magic: String,
    database: Option<u32>,
    /// From the beginning of the server's part, until its head could be read.
    head: Option<Vec<u8>>,
    /// Received and not yet given on; the end of it may be the snapshot's end.
    held: Vec<u8>,
}

/// The opcode that ends a snapshot, its checksum, and the mark of the sync.
const END_BYTES: usize = 1 + CHECKSUM_BYTES + MARK_LENGTH as usize;
const CHECKSUM_BYTES: usize = 8;

impl Joint {
    fn new(mark: [u8; MARK_LENGTH as usize], expected: &Expected) -> Joint {
        let magic = magic(u32::try_from(expected.told.format).unwrap_or(0));
        Joint { mark: EofMark::new(mark), magic, database: expected.database, head: Some(Vec::new()), held: Vec::new() }
    }

    /// Takes what came. True when it was the last.
    fn take(&mut self, bytes: &[u8]) -> Result<bool, Fault> {
        let tail = bytes.get(bytes.len().saturating_sub(MARK_LENGTH as usize)..).unwrap_or_default();
        let whole = !bytes.is_empty() && self.mark.observe(tail, bytes.len());
        match &mut self.head {
            None => self.held.extend_from_slice(bytes),
            Some(head) => {
                head.extend_from_slice(bytes);
                self.read_head()?;
            }
        }
        if whole && self.head.is_some() {
            return Err(Fault::Module("the server's part of the snapshot has no head".into()));
        }
        Ok(whole)
    }

    /// Once the whole head is there: makes sure that it goes with what the child has written.
    fn read_head(&mut self) -> Result<(), Fault> {
        let Some(bytes) = &self.head else { return Ok(()) };
        let parsed = Head::parse(bytes).map_err(|error| Fault::Module(error.to_string()))?;
        let Some((head, _)) = parsed else {
            if bytes.len() > Head::BYTES_MAX {
                return Err(Fault::Module("the head of the server's part has no end".into()));
            }
            return Ok(());
        };
        if !bytes.starts_with(self.magic.as_bytes()) {
            let server = String::from_utf8_lossy(bytes.get(..self.magic.len()).unwrap_or_default()).into_owned();
            let text = format!("its child wrote the format {}, the server {server}", self.magic);
            return Err(Fault::Module(text));
        }
        if self.database.is_some() && head.stream_db() != self.database {
            let (child, server) = (self.database, head.stream_db());
            let text = format!("its child wrote that the stream begins in database {child:?}, the server {server:?}");
            return Err(Fault::Module(text));
        }
        self.held.extend_from_slice(bytes.get(self.magic.len()..).unwrap_or_default());
        self.head = None;
        Ok(())
    }

    /// What may go into the table: all but what may be the end.
    fn ready(&self) -> &[u8] {
        self.held.get(..self.held.len().saturating_sub(END_BYTES)).unwrap_or_default()
    }

    /// ... and has.
    fn taken(&mut self) {
        let ready = self.ready().len();
        self.held.drain(..ready);
    }

    /// The end, as it goes into the table.
    fn end(&self) -> Result<[u8; 1 + CHECKSUM_BYTES], Fault> {
        if self.held.len() != END_BYTES || self.held.first() != Some(&OPCODE_EOF) {
            return Err(Fault::Module("the server's part of the snapshot does not end as one".into()));
        }
        let mut end = [0; 1 + CHECKSUM_BYTES];
        end[0] = OPCODE_EOF;
        Ok(end)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const MARK: [u8; 40] = *b"0123456789abcdef0123456789abcdef01234567";

    fn expected(format: u64, database: Option<u32>) -> Expected {
        Expected { payload: Payload::Mark(MARK), told: WriterStatus { format, ..WriterStatus::default() }, database }
    }

    /// What a server sends: magic, one field, `body`, the end.
    fn sent(body: &[u8]) -> Vec<u8> {
        [b"REDIS0010\xFA\x0erepl-stream-db\x013", body, b"\xFFchecksum", &MARK].concat()
    }

    fn joined(bytes: &[u8], cuts: &[usize], expected: &Expected) -> Result<Vec<u8>, Fault> {
        let mut joint = Joint::new(MARK, expected);
        let (mut out, mut rest, mut whole) = (Vec::new(), bytes, false);
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            whole |= joint.take(now)?;
            out.extend_from_slice(joint.ready());
            joint.taken();
            rest = later;
        }
        assert!(whole, "the mark was not seen");
        out.extend_from_slice(&joint.end()?);
        Ok(out)
    }

    proptest! {
        #[test]
        fn however_it_is_cut_only_magic_checksum_and_mark_are_left_out(
            body in prop::collection::vec(0_u8..0xFA, 0..300),
            cuts in prop::collection::vec(0_usize..80, 0..12),
        ) {
            // A database after the head, so that the head has an end.
            let body = [b"\xFE\x00".as_slice(), &body].concat();
            let out = joined(&sent(&body), &cuts, &expected(10, Some(3))).unwrap();
            let wanted = [b"\xFA\x0erepl-stream-db\x013", &body[..], b"\xFF\0\0\0\0\0\0\0\0"].concat();
            prop_assert_eq!(out, wanted);
        }
    }

    #[test]
    fn parts_that_do_not_belong_together_are_not_joined() {
        let bytes = sent(b"\xFE\0");
        let why = |expected| joined(&bytes, &[], &expected).unwrap_err().to_string();
        assert!(why(expected(11, None)).contains("REDIS0011"));
        assert!(why(expected(10, Some(4))).contains("database"));
        let mut cut = bytes.clone();
        cut.remove(bytes.len() - 45);
        assert!(joined(&cut, &[], &expected(10, None)).unwrap_err().to_string().contains("does not end"));
        let headless = [b"REDIS0010".as_slice(), &MARK].concat();
        assert!(joined(&headless, &[], &expected(10, None)).is_err());
    }
}
