//! Plain payload: a snapshot that is written to the server byte for byte, slot after slot.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use remora_redis::rdb::{ConvertError, Converter, Obstacle};
use remora_table::{Place, Slot};

use super::payload::{WRITE_PIECE, WriteError};
use crate::exit::{Code, Failure};
use crate::replica::link::Link;
use crate::replica::pacer::Pacer;
use crate::replica::spool::{Held, Spool};

/// Interval at which the kernel is asked how much of the lent bytes the server has read. It takes two system calls.
const LENT_PACE: Duration = Duration::from_micros(500);

/// How long a server may read none of the lent bytes. Servers wait as long for their primary (`repl-timeout`).
const LENT_LIMIT: Duration = Duration::from_secs(60);

/// A snapshot that is written to the server byte for byte.
pub(super) struct PlainPayload {
    mark: [u8; 40],
    /// Rewrites the snapshot on its way.
    converter: Option<Box<Converter>>,
    next_slot: u64,
    piece: Option<Piece>,
    /// Bytes of the piece that have been written.
    written: u32,
    /// Slots that the socket still reads.
    lent: VecDeque<Lent>,
    /// Since when the server has read none of them.
    lent_since: Instant,
    lent_due: Instant,
}

/// A slot on its way to the server.
pub(super) enum Piece {
    Fresh(Slot),
    /// As it is in the file of the spool.
    Spooled(Held),
    /// Out of the spool, decrypted; or converted.
    Opened(Vec<u8>),
}

impl Piece {
    fn length(&self) -> u32 {
        match self {
            Piece::Fresh(slot) => slot.length,
            Piece::Spooled(held) => held.length,
            // A slot's length fits.
            Piece::Opened(bytes) => bytes.len() as u32,
        }
    }
}

/// A slot of which the server may not have read everything.
struct Lent {
    slot: Slot,
    /// [`Link::written`] behind it.
    end: u64,
    /// Whether the feed that it came from has ended.
    alone: bool,
}

/// A slot that the server has read, and that must be checked: was it whole until now?
pub(super) struct Used {
    pub(super) slot: Slot,
    /// Whether the feed that it came from has ended.
    pub(super) alone: bool,
}

/// The result of a write.
pub(super) enum Wrote {
    /// There was no room, or nothing to write.
    Nothing,
    Bytes {
        bytes: usize,
        /// The first slot that was not written whole.
        next_slot: u64,
        /// A slot that was copied into the socket, whole.
        used: Option<Slot>,
    },
}

impl PlainPayload {
    pub(super) fn new(now: Instant, mark: [u8; 40], converter: Option<Box<Converter>>) -> PlainPayload {
        let lent = VecDeque::new();
        PlainPayload { mark, converter, next_slot: 0, piece: None, written: 0, lent, lent_since: now, lent_due: now }
    }

    /// The conversion, as far as it has come.
    pub(super) fn converter(&self) -> Option<&Converter> {
        self.converter.as_deref()
    }

    /// The end of the payload.
    pub(super) fn mark(&self) -> &[u8; 40] {
        &self.mark
    }

    /// The slot that is written next, or is being written.
    pub(super) fn next_slot(&self) -> u64 {
        self.next_slot
    }

    pub(super) fn has_piece(&self) -> bool {
        self.piece.is_some()
    }

    pub(super) fn give(&mut self, piece: Piece) {
        self.piece = Some(piece);
    }

    /// Converts a piece that is given next. Returns the slot that was read for it, which must be checked before the
    /// result is believed.
    pub(super) fn convert(
        &mut self,
        piece: Piece,
        spool: Option<&Spool>,
    ) -> (Piece, Option<Slot>, Result<(), WriteError>) {
        let Some(converter) = &mut self.converter else { return (piece, None, Ok(())) };
        let (slot, bytes) = match piece {
            Piece::Fresh(slot) => {
                let (view, range) = slot.bytes();
                let mut bytes = vec![0; slot.length as usize];
                let read = view.read(range.start, &mut bytes).map_err(io::Error::other);
                (Some(slot), read.map(|()| bytes))
            }
            Piece::Opened(bytes) => (None, Ok(bytes)),
            Piece::Spooled(held) => {
                let mut bytes = vec![0; held.length as usize];
                let read = match spool {
                    Some(spool) => spool.file().read_exact_at(&mut bytes, spool.place(held.number)),
                    None => Err(io::ErrorKind::NotFound.into()),
                };
                (None, read.map(|()| bytes))
            }
        };
        let mut out = Vec::new();
        let result = bytes.map_err(WriteError::Link).and_then(|bytes| {
            out.reserve(bytes.len());
            converter.convert(&bytes, &mut out).map_err(|error| WriteError::Refused(refusal(&error)))
        });
        (Piece::Opened(out), slot, result)
    }

    /// Whether the server still has slots to read that were lent to its socket.
    pub(super) fn lends(&self) -> bool {
        !self.lent.is_empty()
    }

    /// When to ask again how much the server has read.
    pub(super) fn lent_due(&self) -> Option<Instant> {
        self.lends().then_some(self.lent_due)
    }

    /// The feed that the slot under way came from is over. The next feed brings that slot again, and the link goes on
    /// in the middle of it. What of it has been written is checked after use with the others.
    pub(super) fn lay_down(&mut self, now: Instant, written: u64) {
        match self.piece.take() {
            Some(Piece::Fresh(slot)) => self.lend(now, slot, written),
            spooled => self.piece = spooled,
        }
        self.lent.iter_mut().for_each(|lent| lent.alone = true);
    }

    /// The slots that an ended link has not given back.
    pub(super) fn into_slots(self) -> impl Iterator<Item = Slot> {
        let piece = match self.piece {
            Some(Piece::Fresh(slot)) => Some(slot),
            _ => None,
        };
        self.lent.into_iter().filter(|lent| !lent.alone).map(|lent| lent.slot).chain(piece)
    }

    /// Returns the slots that the server has read, if it is time to ask.
    pub(super) fn settle(&mut self, now: Instant, link: &mut Link) -> io::Result<Vec<Used>> {
        let mut read = Vec::new();
        if !self.lends() || now < self.lent_due {
            return Ok(read);
        }
        self.lent_due = now + LENT_PACE;
        let taken = link.taken()?;
        while self.lent.front().is_some_and(|lent| lent.end <= taken) {
            let used = self.lent.pop_front().map(|Lent { slot, alone, .. }| Used { slot, alone });
            read.extend(used);
            self.lent_since = now;
        }
        if self.lends() && now.duration_since(self.lent_since) > LENT_LIMIT {
            let text = format!("the server has read nothing for {} s", LENT_LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        Ok(read)
    }

    /// Writes some of the present piece.
    pub(super) fn write(
        &mut self,
        now: Instant,
        link: &mut Link,
        pacer: &mut Pacer,
        spool: Option<&Spool>,
    ) -> io::Result<Wrote> {
        let Some(piece) = &self.piece else { return Ok(Wrote::Nothing) };
        let length = (piece.length() - self.written).min(WRITE_PIECE as u32) as usize;
        let written = self.written as usize;
        let wrote = match piece {
            // All of it belongs to a value that is converted as a whole.
            _ if length == 0 => Some(0),
            Piece::Fresh(slot) => {
                let (view, range) = slot.bytes();
                let start = range.start + u64::from(self.written);
                if link.borrows() {
                    link.lend_view(view, start, length)?
                } else {
                    link.write_view(view, start, length)?
                }
            }
            Piece::Opened(bytes) => link.write(&bytes[written..written + length])?,
            Piece::Spooled(held) => {
                let Some(spool) = spool else { return Ok(Wrote::Nothing) };
                link.write_file(spool.file(), spool.place(held.number) + u64::from(self.written), length)?
            }
        };
        let Some(bytes) = wrote else {
            if let Some(held) = link.held() {
                pacer.full(now, link.written(), held);
            }
            return Ok(Wrote::Nothing);
        };
        self.written += bytes as u32;
        let mut used = None;
        if self.written == piece.length() {
            self.written = 0;
            self.next_slot += 1;
            if let Some(Piece::Fresh(slot)) = self.piece.take() {
                if link.borrows() {
                    self.lend(now, slot, link.written());
                } else {
                    used = Some(slot);
                }
            }
        }
        Ok(Wrote::Bytes { bytes, next_slot: self.next_slot, used })
    }

    /// Notes a slot that the socket reads until [`Link::taken`] is at `end`.
    fn lend(&mut self, now: Instant, slot: Slot, end: u64) {
        if let Place::View(_) = slot.place {
            // The socket holds the pages themselves. A mapping of them would only count as memory of this process.
            let (view, range) = slot.bytes();
            view.forget(range);
        }
        if self.lent.is_empty() {
            self.lent_since = now;
        }
        self.lent.push_back(Lent { slot, end, alone: false });
    }
}

/// Why a conversion ends the sync.
fn refusal(error: &ConvertError) -> Failure {
    match error {
        ConvertError::Refused { what, .. } => {
            let option = match what {
                Obstacle::FieldExpiry => "field-expiry",
                Obstacle::Module(_) => "module-keys",
                Obstacle::Functions => "functions",
            };
            Failure::refused(format!("{error}; it holds what it held. --leave-out {option} leaves such things out"))
        }
        ConvertError::Unknown { .. } => {
            Failure::refused(format!("{error}: this release can't convert snapshots of that primary"))
        }
        ConvertError::Damaged { .. } => Failure::new(Code::SyncFailed, format!("the snapshot is damaged: {error}")),
    }
}

/// Forty random characters, as the servers choose them. No RDB contains them by chance.
pub(super) fn random_mark() -> [u8; 40] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut random = [0; 20];
    if getrandom::fill(&mut random).is_err() {
        // Without random numbers the clock is enough: the mark is not a secret.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        random[..16].copy_from_slice(&now.to_le_bytes());
    }
    let mut mark = [0; 40];
    for (pair, byte) in mark.chunks_exact_mut(2).zip(random) {
        pair[0] = HEX[usize::from(byte >> 4)];
        pair[1] = HEX[usize::from(byte & 15)];
    }
    mark
}
