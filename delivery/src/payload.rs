//! Payload: what a server is given of a snapshot: its bytes as they are, what refers to memory that its module has, or
//! what a server of another family or version understands. First what they have in common.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use super::reference_plan::{Abilities, Part, ReferencePlan};
use crate::link::{Link, Pacer};
use remora_fabric::{Handover, View};
use remora_process::exit::{Code, Failure};
use remora_reader::parts::FeedError;
use remora_reader::spool::{Held, Spool};
use remora_redis::aof::Known;
use remora_redis::commands::{self, Release};
use remora_redis::info::Info;
use remora_redis::rdb::reference::TICKET_BYTES;
use remora_redis::rdb::{ConvertError, Converter, Format, Obstacle, Options};
use remora_redis::resp::Frame;
use remora_server::module::{field, yes_or_why};
use remora_server::{Client, Facts, Family, ServerUrl, Version};
use remora_table::{LoadPage, Place, Slot};

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

// Conversion: what a server of another family, or of an older version, is given (`--convert`).
//
// The snapshot is rewritten on its way to the server ([`remora_redis::rdb::Converter`]). Its stream cannot be: an
// offset counts its bytes. So a command that the server does not know must not be in it: before the sync the primary's
// own counters are asked, and while the agent feeds the stream each command is looked at before it is sent on.

/// The first version of Redis, and all of Valkey, that list the names of their commands alone.
const LISTS_COMMANDS: Version = Version { major: 7, minor: 0, patch: 0 };

/// Names that a refusal shows.
const SHOWN_NAMES: usize = 8;

/// A command that servers of these families write into their stream as other ones.
struct Rewritten {
    name: &'static str,
    by: &'static [Family],
    /// The first version of Redis that does it; of Valkey, all do.
    since: (u32, u32),
    /// What the stream has in its place; a replica needs all of them.
    becomes: &'static [&'static str],
}

const ANY: (u32, u32) = (0, 0);

const BOTH: &[Family] = &[Family::Redis, Family::Valkey];

/// Measured with the servers that docs/how-to/migrate.md names.
const REWRITTEN: [Rewritten; 13] = [
    Rewritten { name: "lmpop", by: BOTH, since: ANY, becomes: &["lpop", "rpop"] },
    Rewritten { name: "blmpop", by: BOTH, since: ANY, becomes: &["lpop", "rpop"] },
    Rewritten { name: "zmpop", by: BOTH, since: ANY, becomes: &["zpopmin", "zpopmax"] },
    Rewritten { name: "bzmpop", by: BOTH, since: ANY, becomes: &["zpopmin", "zpopmax"] },
    Rewritten { name: "hexpire", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hpexpire", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hexpireat", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hgetex", by: BOTH, since: ANY, becomes: &["hpexpireat", "hpersist"] },
    // Valkey 9.1 writes it as it is.
    Rewritten { name: "hgetdel", by: &[Family::Redis], since: ANY, becomes: &["hdel"] },
    Rewritten { name: "hincrbyfloat", by: &[Family::Redis], since: (8, 0), becomes: &["hsetex"] },
    Rewritten { name: "getex", by: BOTH, since: ANY, becomes: &["pexpireat", "persist"] },
    Rewritten { name: "delifeq", by: &[Family::Valkey], since: ANY, becomes: &["del"] },
    Rewritten { name: "delex", by: &[Family::Redis], since: ANY, becomes: &["del"] },
];

/// What a conversion leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// The times at which fields of hashes expire.
    FieldExpiry,
    /// Keys of modules' types.
    ModuleKeys,
    /// Libraries of functions.
    Functions,
}

impl LeftOut {
    /// The word on the command line, which refusals name.
    pub const fn word(self) -> &'static str {
        match self {
            Self::FieldExpiry => "field-expiry",
            Self::ModuleKeys => "module-keys",
            Self::Functions => "functions",
        }
    }
}

/// What is known of a server that a snapshot is converted for.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The format that it reads.
    format: Format,
    /// What is left out of the snapshot.
    left_out: Options,
    /// What it knows of the stream.
    pub known: Arc<Known>,
}

impl Conversion {
    /// Asks a server.
    ///
    /// # Errors
    /// It does not tell its version or its commands.
    pub async fn of(client: &mut Client, facts: &Facts, leave_out: &[LeftOut]) -> Result<Conversion, Failure> {
        let Some(version) = facts.version else {
            let url = client.server().url();
            return Err(Failure::refused(format!(
                "the server {url} does not tell its version (INFO server), so that no snapshot can be converted for it: \
                 omit --convert"
            )));
        };
        let (is_valkey, Version { major, minor, .. }) = (facts.family == Family::Valkey, version);
        let release = Release { family: if is_valkey { "Valkey" } else { "Redis" }, major, minor };
        let format = Format::of_server(is_valkey, (major, minor));
        let answer = match facts.has_redis(LISTS_COMMANDS) {
            true => client.command(&["COMMAND", "LIST"]).await?,
            false => client.command(&["COMMAND"]).await?,
        };
        let left_out = Options {
            drop_field_expiry: leave_out.contains(&LeftOut::FieldExpiry),
            skip_modules: leave_out.contains(&LeftOut::ModuleKeys),
            skip_functions: leave_out.contains(&LeftOut::Functions),
        };
        let Some(commands) = command_names(answer) else {
            let url = client.server().url();
            return Err(Failure::new(Code::Server, format!("the server {url} does not tell its commands (COMMAND)")));
        };
        Ok(Conversion { format, left_out, known: Arc::new(Known { commands, release }) })
    }

    /// A conversion of one snapshot.
    pub fn converter(&self) -> Converter {
        Converter::new(self.format, self.left_out)
    }

    /// Whether fields of hashes lose the time at which they expire.
    pub fn drops_field_expiry(&self) -> bool {
        self.left_out.drop_field_expiry
    }

    /// Refuses a primary that holds what the server cannot.
    pub fn check_contents(&self, primary: &Facts, server: &Facts, url: &ServerUrl) -> Result<(), Failure> {
        let holds_them = server.holds_field_ttls() || self.drops_field_expiry();
        check_field_ttls(primary, server, url, holds_them)
    }

    /// Refuses a primary that has run commands which the server does not know: they come again. `ran`: its `INFO
    /// commandstats`.
    pub fn check_commands(&self, ran: &Info, primary: &Facts, url: &ServerUrl) -> Result<(), Failure> {
        let unknown: Vec<&str> = self.unknown_of(ran, primary).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let more = unknown.len().saturating_sub(SHOWN_NAMES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown = unknown.iter().take(SHOWN_NAMES).map(|name| name.to_uppercase()).collect::<Vec<_>>().join(", ");
        Err(Failure::refused(format!(
            "the primary has run commands that the server {url} does not know, and which would fail there: {shown}{more} \
             (INFO commandstats). If no client sends them any more, reset the counters with CONFIG RESETSTAT"
        )))
    }

    fn unknown_of<'i>(&self, ran: &'i Info, primary: &Facts) -> impl Iterator<Item = &'i str> {
        let by = (primary.family, primary.version.map_or(ANY, |version| (version.major, version.minor)));
        let names = ran.iter().filter_map(|(field, _)| field.strip_prefix("cmdstat_"));
        names.filter(move |name| {
            // A command of a module is in no table, and can write.
            let writes = commands::find(name.as_bytes()).map_or(WRITES_OF_MODULES.contains(name), |known| known.writes);
            writes && !self.knows(name, by)
        })
    }

    /// Whether the server knows a command, or what the primary's stream has in its place.
    fn knows(&self, name: &str, (family, version): (Family, (u32, u32))) -> bool {
        let has = |name: &str| self.known.commands.contains(name.split('|').next().unwrap_or(name));
        let is_done = |rewritten: &&Rewritten| {
            let is_new_enough = family == Family::Valkey || version >= rewritten.since;
            rewritten.name == name && rewritten.by.contains(&family) && is_new_enough
        };
        let rewritten = REWRITTEN.iter().find(is_done);
        match rewritten {
            Some(rewritten) => rewritten.becomes.iter().all(|name| has(name)),
            None => has(name),
        }
    }
}

/// Refuses a server that cannot become a replica of this primary by a conversion, as far as the primary can tell.
///
/// # Errors
/// Why, or one of them does not answer.
pub async fn refuse(primary: &mut Client, server: &mut Client, left_out: &[LeftOut]) -> Result<(), Failure> {
    let (of_primary, of_server) = (Facts::read(primary).await?, Facts::read(server).await?);
    if of_primary.is_of_one_release_with(&of_server) {
        return Ok(());
    }
    let (url, at) = (server.server().url().clone(), primary.server().url().clone());
    let refused =
        |why: String| Err(Failure::refused(format!("{url} ({}) cannot follow {at}: {why}", of_server.name())));
    let missing: Vec<&str> = of_primary.modules_missing_at(&of_server);
    let missing: Vec<&str> = missing.into_iter().filter(|name| !WITH_REDIS.contains(name)).collect();
    if !missing.is_empty() && !left_out.contains(&LeftOut::ModuleKeys) {
        return refused(format!(
            "it lacks modules: {}; load them there, or have its agent leave their keys out (--leave-out module-keys)",
            missing.join(", ")
        ));
    }
    if of_primary.libraries.is_some_and(|count| count > 0)
        && !of_server.has_redis(LISTS_COMMANDS)
        && !left_out.contains(&LeftOut::Functions)
    {
        return refused("it knows no functions, and there are libraries of them (--leave-out functions)".into());
    }
    if let Some(highest) = of_primary.highest_database().filter(|highest| *highest > 0) {
        let has = server.config_get(DATABASES_OF_A_CLUSTER).await?.and_then(|count| count.parse::<u32>().ok());
        if has.is_none_or(|count| count <= highest) {
            return refused(format!("there are keys in database {highest} ({DATABASES_OF_A_CLUSTER})"));
        }
    }
    let conversion = Conversion::of(server, &of_server, left_out).await?;
    conversion.check_contents(&of_primary, &of_server, &url)?;
    conversion.check_commands(&primary.info("commandstats").await?, &of_primary, &url)
}

/// Refuses a server that cannot hold hashes whose fields expire, if the primary has any: the primary's snapshot for it
/// would fail, or its own load.
pub fn check_field_ttls(facts: &Facts, target: &Facts, url: &ServerUrl, holds_them: bool) -> Result<(), Failure> {
    let hashes = facts.databases.iter().map(|database| database.field_expires).fold(0, u64::saturating_add);
    if hashes == 0 || holds_them {
        return Ok(());
    }
    let plural = if hashes == 1 { "hash" } else { "hashes" };
    Err(Failure::refused(format!(
        "the server {url} ({}) cannot hold fields that expire, and the primary ({}) has {hashes} {plural} with such fields (INFO \
         keyspace): run a server there that is as new as the primary, of the same kind",
        target.name(),
        facts.name()
    )))
}

/// How many databases nodes of Valkey 9 have.
const DATABASES_OF_A_CLUSTER: &str = "cluster-databases";

/// Modules that are a part of Redis 8. Its commands that write say whether there are keys of them.
const WITH_REDIS: [&str; 1] = ["vectorset"];

/// Commands that write of the modules that are a part of Redis 8. Those of other modules come with a module that the
/// server lacks, whose keys are refused.
const WRITES_OF_MODULES: [&str; 3] = ["vadd", "vrem", "vsetattr"];

/// The names in an answer to `COMMAND LIST`, or to `COMMAND`, in lower case.
pub fn command_names(answer: Frame) -> Option<BTreeSet<String>> {
    let name = |command: &Frame| match command {
        Frame::Array(fields) => fields.first().and_then(Frame::as_str).map(str::to_ascii_lowercase),
        name => name.as_str().map(str::to_ascii_lowercase),
    };
    Some(answer.into_array().ok()?.iter().filter_map(name).collect())
}

// Introduction: gives memory to a server that has our module, so that the payload can refer to it.
//
// The descriptors pass over a local socket, whose address the server gets by a command. Both are used once. Not here:
// the payload.

/// The delivery's half of an introduction: the memory that the server's module was given.
pub struct GrantedMemory {
    /// The first field of the payload must contain this.
    pub ticket: [u8; TICKET_BYTES],
    /// The page on which the server counts.
    pub tally: LoadPage,
}

/// The half of the server's task: the descriptors and the command.
pub struct Introduction {
    /// The number of the introduction, so that a late answer is not taken for another's.
    pub number: u64,
    /// The descriptors, and the socket over which they pass. `None` in a simulation, which has no memory to pass.
    means: Option<(Handover, Vec<OwnedFd>)>,
    ticket: [u8; TICKET_BYTES],
    length: u64,
}

impl fmt::Debug for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Introduction").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What the server's module answered.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Whether it can set idle times.
    pub idle_times: bool,
    /// Whether it takes runs of small values (fast keys), or why not.
    pub fast_keys: Result<(), String>,
    /// Whether it wants to look at what it has loaded, before the snapshot ends.
    pub verify: bool,
}

/// How long the server may take to fetch the descriptors: it gets the command at once, but may be busy.
const HANDOVER_LIMIT: Duration = Duration::from_secs(3);

/// How long the command may take: the server first removes its keys, which takes long for a large data set.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// Prepares both halves for this memory.
pub fn prepare(view: &View, number: u64) -> Result<(GrantedMemory, Introduction), String> {
    let text = |error: &dyn fmt::Display| format!("memory cannot be given to the server: {error}");
    let mut ticket = [0; TICKET_BYTES];
    getrandom::fill(&mut ticket).map_err(|error| text(&error))?;
    let tally = LoadPage::create().map_err(|error| text(&error))?;
    let page = tally.memory().as_fd().try_clone_to_owned().map_err(|error| text(&error))?;
    // A memfd that another user handed to this process for reading cannot be opened again, and need not be.
    let memory = view.reopen_read_only().or_else(|_| view.as_fd().try_clone_to_owned());
    let descriptors = vec![memory.map_err(|error| text(&error))?, page];
    let handover = Handover::bind(&remora_fabric::shm::Place::Abstract).map_err(|error| text(&error))?;
    Ok((
        GrantedMemory { ticket, tally },
        Introduction { number, means: Some((handover, descriptors)), ticket, length: view.length() },
    ))
}

impl Introduction {
    /// An introduction without memory.
    pub fn simulated(number: u64) -> Introduction {
        Introduction { number, means: None, ticket: [0; TICKET_BYTES], length: 0 }
    }

    /// Sends the command, and passes the descriptors. The server removes its keys.
    pub async fn perform(self, client: &mut Client) -> Result<Answer, String> {
        let Introduction { means, ticket, length, .. } = self;
        let ticket: String = ticket.iter().map(|byte| format!("{byte:02x}")).collect();
        let (mut address, mut secret, length) = (String::new(), String::new(), length.to_string());
        let giving = means.map(|(handover, descriptors)| {
            (address, secret) = (handover.address(), handover.secret());
            tokio::task::spawn_blocking(move || {
                let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                handover.give(&descriptors, HANDOVER_LIMIT)
            })
        });
        let command = ["REMORA.LOAD", &address, &secret, &ticket, &length, "FLUSH"];
        let frame = client.command_within(ANSWER_LIMIT, &command).await.map_err(|error| error.to_string())?;
        if let Some(giving) = giving {
            match giving.await {
                Ok(given) => given.map_err(|error| error.to_string())?,
                Err(error) => return Err(error.to_string()),
            }
        }
        let idle_times = match field(&frame, b"idle_times").as_deref() {
            Some("yes") => true,
            Some("no") => false,
            _ => return Err(format!("REMORA.LOAD was answered by {frame:?}, which does not say idle_times")),
        };
        let fast_keys = yes_or_why(field(&frame, b"fast_keys").as_deref());
        Ok(Answer { idle_times, fast_keys, verify: field(&frame, b"verify").as_deref() == Some("yes") })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn conversion(known: &[&str]) -> Conversion {
        let commands = known.iter().map(|name| (*name).to_owned()).collect();
        let release = Release { family: "Valkey", major: 8, minor: 1 };
        Conversion {
            format: Format::COMMON,
            left_out: Options::default(),
            known: Arc::new(Known { commands, release }),
        }
    }

    #[test]
    fn a_primary_that_has_run_what_the_server_lacks_is_refused_by_name() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let ran = |names: &[&str]| {
            let text: String = names.iter().map(|name| format!("cmdstat_{name}:calls=1,usec=2\r\n")).collect();
            Info::parse(text.as_bytes())
        };
        let conversion = conversion(&["set", "xgroup", "get", "lpop", "rpop", "hdel", "del", "hincrbyfloat"]);
        let server =
            |family, major| Facts { family, version: Some(Version { major, minor: 0, patch: 0 }), ..Facts::default() };
        let (redis, valkey) = (server(Family::Redis, 8), server(Family::Valkey, 9));
        for fine in [&["set", "get", "xgroup|create"][..], &["lmpop"], &["hgetdel", "delex"], &["ft.search", "vsim"]] {
            conversion.check_commands(&ran(fine), &redis, &url).unwrap();
        }
        let refused =
            conversion.check_commands(&ran(&["set", "hexpire", "vadd", "xackdel"]), &redis, &url).unwrap_err();
        for name in ["HEXPIRE", "VADD", "XACKDEL", "redis://h:1", "CONFIG RESETSTAT"] {
            assert!(refused.message.contains(name), "{refused}");
        }
        for (name, by) in
            [("function|load", &redis), ("hgetdel", &valkey), ("delifeq", &redis), ("hincrbyfloat", &redis)]
        {
            assert!(conversion.check_commands(&ran(&[name]), by, &url).is_err(), "{name}");
        }
        for by in [server(Family::Redis, 7), valkey] {
            conversion.check_commands(&ran(&["hincrbyfloat"]), &by, &url).unwrap();
        }
    }

    #[test]
    fn both_answers_name_the_commands() {
        let text = |text: &str| Frame::Bulk(text.as_bytes().to_vec());
        let list = Frame::Array(vec![text("GET"), text("set")]);
        let rows =
            Frame::Array(vec![Frame::Array(vec![text("get"), Frame::Integer(2)]), Frame::Array(vec![text("set")])]);
        let wanted: BTreeSet<String> = ["get", "set"].map(str::to_owned).into();
        assert_eq!(command_names(list), Some(wanted.clone()));
        assert_eq!(command_names(rows), Some(wanted));
        assert_eq!(command_names(Frame::Null), None);
    }
}
