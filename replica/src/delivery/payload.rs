//! Payload: what the plain and the referenced payload have in common.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use remora_redis::rdb::{ConvertError, Converter, Obstacle};
use remora_table::{LoadPage, Place, Slot};

use super::reference_plan::{Abilities, Part, ReferencePlan};
use crate::delivery::introduction::{Answer, GrantedMemory};
use crate::link::{Link, Pacer};
use remora_process::exit::{Code, Failure};
use remora_reader::parts::FeedError;
use remora_reader::spool::{Held, Spool};

/// Bytes handed to the socket at once.
pub(super) const WRITE_PIECE: usize = 1 << 20;

/// Why a payload cannot continue.
pub(super) enum WriteError {
    Link(io::Error),
    Feed(FeedError),
    /// A slot of the source's own memory is damaged: reading it again would give the same bytes.
    Damaged(FeedError),
    /// The server cannot be given this snapshot.
    Refused(Failure),
    /// The server's module refused, or cannot be sent this.
    Module(String),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        WriteError::Link(error)
    }
}

// Plain payload: a snapshot that is written to the server byte for byte, slot after slot.

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
        ConvertError::Damaged { .. } => Failure::new(
            Code::SyncFailed,
            format!("the source's snapshot is damaged: {error}; restart remora source, which then takes another one"),
        ),
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

// Referenced payload: a snapshot on its way to a server that has our module. It writes what the [`ReferencePlan`]
// says, and returns slots when the server has used them. The caller hands slots in, from whatever source.

/// A snapshot whose long strings the server copies from shared memory.
pub(super) struct ReferencedPayload {
    mark: [u8; 40],
    plan: ReferencePlan,
    tally: LoadPage,
    /// Slots that were planned and not returned yet.
    lent: VecDeque<LentSlots>,
    /// Positions below this were taken.
    taken: u64,
    /// Parts that have been written: the second is the greeting.
    parts: u64,
    began: Instant,
    /// The module wants to look at what it has loaded, and was not told to yet.
    verify: bool,
}

/// A slot, and when it is used up.
struct LentSlots {
    slot: Slot,
    /// Position behind its last byte.
    end: u64,
    /// Fields that must have been counted.
    fields: u64,
}

/// The result of a write.
pub(super) enum Turn {
    /// This number of bytes was written.
    Wrote(usize),
    /// There is nothing to write, or no room.
    Nothing,
    /// All slots were written and used. These bytes complete the payload.
    Whole(Vec<u8>),
}

/// Slots that may be with the server at once: enough that it need not wait for us, while what it has read is soon given
/// back.
const LENT_MAX: usize = 12;

/// Strings no longer than this number of slots are described when all of them are there, in slots that the source
/// keeps: half of those that may be with the server. (Slots in buffers are few, and may all be taken before such a
/// string ends.)
const WHOLE_SLOTS: u64 = LENT_MAX as u64 / 2;

/// Checks a slot in the source's own memory. The reader does not sum such slots, because a server sums the whole
/// snapshot as it loads; but a server that is only referred to strings sums none of their bytes.
fn check_in_place(slot: &Slot) -> Result<(), WriteError> {
    let (view, place) = slot.bytes();
    let got = view.crc32c(place).map_err(|error| WriteError::Module(error.to_string()))?;
    let want = slot.crc().map_err(|error| WriteError::Module(error.to_string()))?;
    if got == want {
        return Ok(());
    }
    let error = remora_table::Error::Corrupt { slot: slot.number, want, got };
    Err(WriteError::Damaged(error.into()))
}

/// The magic and the greeting.
const GREETING_PARTS: u64 = 2;

/// How long the server may take from our first bytes to the greeting: it is empty, and has only to begin. One that
/// loads from a file after all never gets there.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);

impl ReferencedPayload {
    /// Begins a payload with the snapshot's first slot.
    pub(super) fn new(
        now: Instant,
        mark: [u8; 40],
        shown: GrantedMemory,
        answer: Answer,
        first: Slot,
    ) -> Result<ReferencedPayload, WriteError> {
        let whole = if matches!(first.place, Place::View(_)) { WHOLE_SLOTS * u64::from(first.length) } else { 0 };
        let abilities = Abilities { idle_times: answer.idle_times, runs: answer.fast_keys.is_ok() };
        let plan = ReferencePlan::new(shown.ticket, abilities, whole);
        let (tally, lent, verify) = (shown.tally, VecDeque::new(), answer.verify);
        let mut payload = ReferencedPayload { mark, plan, tally, lent, taken: 0, parts: 0, began: now, verify };
        payload.take(first)?;
        Ok(payload)
    }

    /// Slots that were not given back.
    pub(super) fn into_slots(self) -> impl Iterator<Item = Slot> {
        self.lent.into_iter().map(|lent| lent.slot)
    }

    /// Whether something may be written.
    pub(super) fn has_part(&self) -> bool {
        self.plan.part().is_some() && !self.awaits_greeting()
    }

    /// Bytes that were not written but referred to.
    pub(super) fn referred(&self) -> u64 {
        self.plan.referred()
    }

    /// Returns the slots that are used up. The error says that the module refused.
    pub(super) fn settle(&mut self) -> Result<Vec<Used>, WriteError> {
        if let Some(text) = self.tally.refusal() {
            return Err(WriteError::Module(text));
        }
        // In this order: what the server counted, it had read before; and before the entry is looked at again.
        let (done, passed) = (self.tally.done(), self.plan.passes_from());
        let mut used = Vec::new();
        while self.lent.front().is_some_and(|lent| lent.fields <= done && lent.end <= passed) {
            used.extend(self.lent.pop_front().map(|lent| Used { slot: lent.slot, alone: false }));
        }
        Ok(used)
    }

    /// Whether another slot may be with the server.
    pub(super) fn wants_slot(&self) -> bool {
        self.lent.len() < LENT_MAX
    }

    /// Plans what is written of this slot, which follows the one before.
    pub(super) fn take(&mut self, slot: Slot) -> Result<(), WriteError> {
        let (view, place) = slot.bytes();
        if matches!(slot.place, Place::View(_)) {
            check_in_place(&slot)?;
        }
        self.plan.take(view, place).map_err(|error| WriteError::Module(error.to_string()))?;
        self.taken += u64::from(slot.length);
        self.lent.push_back(LentSlots { slot, end: self.taken, fields: self.plan.fields() });
        Ok(())
    }

    /// Writes as much as the socket takes. `fetched` says that no more slots follow.
    pub(super) fn write(&mut self, now: Instant, link: &mut Link, fetched: bool) -> Result<Turn, WriteError> {
        if self.awaits_greeting() && now.duration_since(self.began) > BEGIN_LIMIT {
            let text = format!("the server did not begin to load from its link within {} s", BEGIN_LIMIT.as_secs());
            return Err(WriteError::Module(text));
        }
        if self.has_part() {
            return Ok(self.write_part(link)?.map_or(Turn::Nothing, Turn::Wrote));
        }
        if fetched && self.lent.is_empty() && std::mem::take(&mut self.verify) {
            self.plan.verify();
            return Ok(self.write_part(link)?.map_or(Turn::Nothing, Turn::Wrote));
        }
        let is_counted = self.tally.done() >= self.plan.fields();
        if fetched && is_counted && self.lent.is_empty() && self.plan.part().is_none() {
            let mut end = self.plan.finish().map_err(WriteError::Module)?;
            end.extend_from_slice(&self.mark);
            return Ok(Turn::Whole(end));
        }
        Ok(Turn::Nothing)
    }

    /// The greeting is on its way: nothing else may follow before the server has counted it.
    fn awaits_greeting(&self) -> bool {
        self.parts >= GREETING_PARTS && self.tally.done() == 0
    }

    /// Writes as much of the next part as the socket takes.
    fn write_part(&mut self, link: &mut Link) -> Result<Option<usize>, WriteError> {
        let wrote = match self.plan.part() {
            Some(Part::Bytes(bytes)) => link.write(bytes)?,
            Some(Part::Pass(range)) => {
                let lent = self.lent.iter().find(|lent| range.start < lent.end);
                let Some(LentSlots { slot, end, .. }) = lent else {
                    return Err(WriteError::Module("a part of the snapshot was given back too early".into()));
                };
                let (view, place) = slot.bytes();
                let left = range.end.min(*end) - range.start;
                let offset = place.end - (end - range.start);
                link.write_view(view, offset, left.min(WRITE_PIECE as u64) as usize)?
            }
            None => None,
        };
        let Some(bytes) = wrote else { return Ok(None) };
        self.parts += u64::from(self.plan.wrote(bytes));
        Ok(Some(bytes))
    }
}
