//! Joins what the server saves to the strings that its child has written into the source's table.
//!
//! Each part is a snapshot of its own. A snapshot may repeat its fields, its databases and their sizes. So one snapshot
//! is made of both parts by leaving out the bytes that may occur only once:
//!
//! ```text
//!   the child's   REDIS0011 fields │ database, long strings … │
//!   the server's  ─────────         fields, functions, database, everything else … FF  ────────   ────
//!                 magic: left out                                                      checksum    mark
//!                                                                                      → zeros     left out
//! ```
//!
//! The server's checksum covers its own bytes alone. Zeros mean that the snapshot has no checksum; the table has one
//! for each slot. Why the server leaves out the long strings is described in [`super::with_module`].

use remora_redis::psync::Payload;
use remora_redis::psync::client::EofMark;
use remora_redis::rdb::{Head, OPCODE_EOF, magic};
use remora_table::SnapshotWriter;
use remora_table::server_pages::capture_page::WriterStatus;

use super::Capture;
use super::plan::CaptureError;
use super::sealing::Sealing;
use super::snapshot::{DURING, MARK_BYTES, Taking, pause_after};
use super::socket::Socket;

/// What the server's part must be like.
pub(super) struct Expected {
    /// How the server marks the end of its part.
    pub(super) payload: Payload,
    /// What the child has written.
    pub(super) written: WriterStatus,
    /// The database in which the stream begins, as the child reported it; `None` if it makes no difference. A primary's
    /// stream begins with a `SELECT`. A replica forwards its primary's stream unchanged, so there the database counts.
    pub(super) database: Option<u32>,
}

impl Capture {
    /// Receives the server's part, appends it to what the child has written, and completes the snapshot.
    pub(super) fn receive_rest(
        &self,
        socket: &mut Socket,
        expected: &Expected,
        sealing: Option<Sealing>,
    ) -> Result<(), CaptureError> {
        let (memory, geometry) = &self.plan.snapshot;
        let writer = SnapshotWriter::resume(memory.clone(), *geometry, expected.written.received)?;
        let mut taking = Taking::new(self, writer, sealing);
        self.append_rest(&mut taking, socket, expected)?;
        taking.complete(0)
    }

    fn append_rest(
        &self,
        taking: &mut Taking<'_>,
        socket: &mut Socket,
        expected: &Expected,
    ) -> Result<(), CaptureError> {
        let Payload::Mark(mark) = expected.payload else {
            let text = "the server sent its part from a file, which other clients may have received as well";
            return Err(CaptureError::Module(text.into()));
        };
        let mut joint = Joint::new(mark, expected)?;
        let mut buffer = vec![0; READ_BYTES];
        let mut silence = self.silence(DURING);
        let mut whole = false;
        while !whole {
            self.stop.check()?;
            let Some(n) = silence.check(socket.read(&mut buffer))? else { continue };
            whole = joint.take(&buffer[..n])?;
            taking.append(joint.ready())?;
            joint.taken();
            silence.restart();
            if !whole {
                pause_after(n);
            }
        }
        taking.append(&joint.end()?)
    }
}

/// The most bytes that one read takes. They are copied once more from the buffer, so it should fit in a second-level
/// cache.
const READ_BYTES: usize = 256 << 10;

/// Decides which bytes of the server's part go into the table. Pure.
struct Joint {
    mark: EofMark,
    /// The magic that both parts must have.
    magic: String,
    database: Option<u32>,
    /// The beginning of the server's part, until the whole head has arrived.
    head: Option<Vec<u8>>,
    /// Bytes that were received and not yet appended. The last of them may be the snapshot's end.
    held: Vec<u8>,
}

/// Bytes that end the server's part: the opcode, the checksum, and the mark of the sync.
const END_BYTES: usize = 1 + CHECKSUM_BYTES + MARK_BYTES as usize;
const CHECKSUM_BYTES: usize = 8;

impl Joint {
    /// # Errors
    /// The child reported a format that no snapshot has: its page is memory of the server's process.
    fn new(mark: [u8; MARK_BYTES as usize], expected: &Expected) -> Result<Joint, CaptureError> {
        let format = expected.written.format;
        let magic = u32::try_from(format).ok().and_then(magic);
        let magic = magic.ok_or_else(|| {
            CaptureError::Module(format!("its child reported the format {format}, which no snapshot has"))
        })?;
        let (mark, database) = (EofMark::new(mark), expected.database);
        Ok(Joint { mark, magic, database, head: Some(Vec::new()), held: Vec::new() })
    }

    /// Takes bytes that were received. True if they end the server's part.
    fn take(&mut self, bytes: &[u8]) -> Result<bool, CaptureError> {
        let tail = bytes.get(bytes.len().saturating_sub(MARK_BYTES as usize)..).unwrap_or_default();
        let whole = !bytes.is_empty() && self.mark.observe(tail, bytes.len());
        match &mut self.head {
            None => self.held.extend_from_slice(bytes),
            Some(head) => {
                head.extend_from_slice(bytes);
                self.read_head()?;
            }
        }
        if whole && self.head.is_some() {
            return Err(CaptureError::Module("the server's part of the snapshot has no head".into()));
        }
        Ok(whole)
    }

    /// Parses the head once it has arrived, and checks that it matches what the child has written.
    fn read_head(&mut self) -> Result<(), CaptureError> {
        let Some(bytes) = &self.head else { return Ok(()) };
        let parsed = Head::parse(bytes).map_err(|error| CaptureError::Module(error.to_string()))?;
        let Some((head, _)) = parsed else {
            if bytes.len() > Head::BYTES_MAX {
                return Err(CaptureError::Module("the head of the server's part has no end".into()));
            }
            return Ok(());
        };
        if !bytes.starts_with(self.magic.as_bytes()) {
            let server = String::from_utf8_lossy(bytes.get(..self.magic.len()).unwrap_or_default()).into_owned();
            let text = format!("its child wrote the format {}, the server {server}", self.magic);
            return Err(CaptureError::Module(text));
        }
        if self.database.is_some() && head.stream_db() != self.database {
            let (child, server) = (self.database, head.stream_db());
            let text = format!("its child wrote that the stream begins in database {child:?}, the server {server:?}");
            return Err(CaptureError::Module(text));
        }
        self.held.extend_from_slice(bytes.get(self.magic.len()..).unwrap_or_default());
        self.head = None;
        Ok(())
    }

    /// The bytes that can be appended: all but the last ones, which may be the end.
    fn ready(&self) -> &[u8] {
        self.held.get(..self.held.len().saturating_sub(END_BYTES)).unwrap_or_default()
    }

    /// Forgets the bytes of [`ready`](Self::ready), which have been appended.
    fn taken(&mut self) {
        let ready = self.ready().len();
        self.held.drain(..ready);
    }

    /// The end of the snapshot, with zeros for the checksum.
    fn end(&self) -> Result<[u8; 1 + CHECKSUM_BYTES], CaptureError> {
        if self.held.len() != END_BYTES || self.held.first() != Some(&OPCODE_EOF) {
            return Err(CaptureError::Module("the server's part of the snapshot does not end as one".into()));
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
        Expected { payload: Payload::Mark(MARK), written: WriterStatus { format, ..WriterStatus::default() }, database }
    }

    /// What a server sends: magic, one field, `body`, the end.
    fn sent(body: &[u8]) -> Vec<u8> {
        [b"REDIS0010\xFA\x0erepl-stream-db\x013", body, b"\xFFchecksum", &MARK].concat()
    }

    fn joined(bytes: &[u8], cuts: &[usize], expected: &Expected) -> Result<Vec<u8>, CaptureError> {
        let mut joint = Joint::new(MARK, expected)?;
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
    fn a_format_that_no_snapshot_has_is_refused() {
        for format in [1000, 0x1_0000_000A, u64::MAX] {
            let error = joined(&sent(b"\xFE\0"), &[], &expected(format, None)).unwrap_err();
            assert!(error.to_string().contains(&format!("the format {format}")), "{error}");
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
