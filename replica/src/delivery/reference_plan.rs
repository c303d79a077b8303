//! Reference plan: what is written of a snapshot to a server that has the module. Long strings are described by their
//! place in shared memory; all other bytes are passed on unchanged. Decides only; the delivery reads, writes and
//! releases slots.
//!
//! ```text
//!   snapshot    REDIS0011 │ fields │ key │ key ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ key │ key ▓▓▓▓▓▓▓▓ │ key │ FF checksum
//!                  │           │      │             │             │          │         │
//!   to the link    ▼    greeting ─▶ passed on    field: key,    passed    field      passed   FF, no checksum
//!                                                length, place
//!   the server                  loads            ┄┄ copies ┄┄▶  loads     ┄┄┄┄┄┄┄▶   loads        whole
//! ```
//!
//! What must hold:
//! - Nothing but the greeting goes out before the server has counted it: only then is it loading from the link, with
//!   the module.
//! - A slot is given back only when all of it that is passed on has been written, and every field that refers to it was
//!   counted.
//! - The end goes out only when every slot was given back and found unchanged.
//! - What the scanner does not understand is passed on: at worst everything.
//!
//! If the module takes runs, whole records of small values are described by their place too. The record that lies
//! across the border of two slots is passed on.

use std::collections::VecDeque;
use std::ops::Range;

use remora_fabric::View;
use remora_redis::rdb::reference::{RUN_BYTES_MAX, RUN_VALUES_BELOW, TICKET_BYTES, Word, field};
use remora_redis::rdb::{
    Found, OPCODE_EOF, RECORD_HEAD_BYTES_MAX, RECORD_KEY_BYTES_MAX, Run, Scanner, TAIL_BYTES, Text, Usage,
};

/// Shorter strings are passed on: the server gains nothing by a reference to each of them (docs/explanation/module.md
/// has the measurement).
const REFER_FROM_BYTES: u64 = 512;

/// What the server's module can do with references.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    /// It can set the idle times of keys that are referred to one by one.
    pub(super) idle_times: bool,
    /// It takes runs of small values.
    pub(super) runs: bool,
}

/// A part that is still to be written.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// These bytes.
    Bytes(Vec<u8>),
    /// These bytes of the snapshot, which lie in slots that were taken.
    Pass(Range<u64>),
}

/// Which bytes of a snapshot are written to a server with the module, and which it copies from memory.
/// Positions are bytes from the start of the snapshot.
pub(super) struct ReferencePlan {
    /// `None`: the rest is passed on without being parsed.
    scanner: Option<Scanner>,
    abilities: Abilities,
    greeting: Vec<u8>,
    parts: VecDeque<Part>,
    /// The value that is being referred to, as far as it is still to come.
    value: Range<u64>,
    /// The words of that value so far, where they are held back until it is whole.
    open: Option<Open>,
    /// Values up to this size are held back until they are whole: the server creates them in one step.
    whole: u64,
    /// Where the end mark is, once it was found.
    end: Option<u64>,
    /// Everything below this position is in a part, or referred to.
    planned: u64,
    /// Bytes from `planned` on whose slots may be gone: they may belong to a string that is still to be found.
    held: Vec<u8>,
    /// Everything below this position was scanned.
    seen: u64,
    /// Words of the next field.
    words: Vec<u8>,
    /// Fields made so far, the greeting included.
    fields: u64,
    /// Bytes referred to.
    referred: u64,
    /// Whether the plan has decided if scanning pays.
    judged: bool,
    /// Bytes copied out of a slot to be looked at, and the position of the first.
    window: (u64, Vec<u8>),
    /// The last record was of a small value, and more of them are likely to follow.
    in_runs: bool,
    /// Bytes that the words of the next field refer to.
    described: u64,
}

/// Words that are held back.
struct Open {
    /// What the string is.
    text: Vec<u8>,
    /// Where its bytes lie, those that follow each other in one.
    pieces: Vec<(u64, u64)>,
}

/// Bytes of words at which a field is closed. The server reads about this much of its link at a time.
const FIELD_BYTES: usize = 16 << 10;

/// Bytes in runs after which a field is closed: the server executes a field at once, and should answer its clients
/// between two of them.
const DESCRIBED_BYTES: u64 = 2 << 20;

/// Bytes that are scanned at a time. They are copied first, so they should fit into a second-level cache.
const LOOK_BYTES: u64 = 64 << 10;

const _: () = assert!(LOOK_BYTES <= RUN_BYTES_MAX as u64, "a run is not longer than what is scanned at a time");

/// A rest of what is scanned that may be a record of a run that is cut off: it is scanned again, with what follows.
const CUT_OFF_BYTES: u64 = RUN_VALUES_BELOW + (RECORD_KEY_BYTES_MAX + RECORD_HEAD_BYTES_MAX) as u64;

/// Bytes that are scanned first after a value was skipped: usually the next record's head is enough. If it is not, the
/// next scan takes twice as many.
const FIRST_LOOK_BYTES: u64 = 256;

/// Bytes after which the plan decides whether scanning pays. The order of keys in a snapshot is as good as random.
const TRIAL_BYTES: u64 = 32 << 20;

/// Scanning pays if at least this percentage of these bytes could be referred to.
const WORTH_PERCENT: u64 = 10;

/// Bytes of the magic and the version. The greeting follows them.
const MAGIC_BYTES: u64 = 9;

impl ReferencePlan {
    /// A plan for a new snapshot. A string of up to `whole` bytes is referred to in one piece, after all its slots have
    /// arrived. (The slots that are not given back must have room for it.)
    pub(super) fn new(ticket: [u8; TICKET_BYTES], abilities: Abilities, whole: u64) -> ReferencePlan {
        let mut words = Vec::new();
        Word::Hello { ticket }.encode(&mut words);
        let scanner = if abilities.runs { Scanner::of_runs(RUN_VALUES_BELOW) } else { Scanner::new(REFER_FROM_BYTES) };
        ReferencePlan {
            scanner: Some(scanner),
            abilities,
            greeting: field(&words),
            parts: VecDeque::new(),
            value: 0..0,
            open: None,
            whole,
            end: None,
            planned: 0,
            held: Vec::new(),
            seen: 0,
            words: Vec::new(),
            fields: 0,
            referred: 0,
            judged: false,
            window: (0, Vec::new()),
            in_runs: false,
            described: 0,
        }
    }

    /// The part to write next.
    pub(super) fn part(&self) -> Option<&Part> {
        self.parts.front()
    }

    /// Notes that `bytes` bytes of the part have been written. Returns whether the part is complete.
    pub(super) fn wrote(&mut self, bytes: usize) -> bool {
        let over = match self.parts.front_mut() {
            Some(Part::Bytes(rest)) => {
                rest.drain(..bytes.min(rest.len()));
                rest.is_empty()
            }
            Some(Part::Pass(range)) => {
                range.start = range.end.min(range.start + bytes as u64);
                range.is_empty()
            }
            None => false,
        };
        if over {
            self.parts.pop_front();
        }
        over
    }

    /// The first byte of the slots that is still to be passed on.
    pub(super) fn passes_from(&self) -> u64 {
        let first = self.parts.iter().find_map(|part| match part {
            Part::Pass(range) => Some(range.start),
            Part::Bytes(_) => None,
        });
        first.unwrap_or(self.seen)
    }

    /// How many fields there are so far, the one included that what is held back will be in. A slot that has been taken
    /// is used up when that number of fields is counted and all its bytes were passed on.
    pub(super) fn fields(&self) -> u64 {
        self.fields + u64::from(self.open.is_some())
    }

    /// Plans the field by which the module looks at what it has loaded. Nothing but the end follows.
    pub(super) fn verify(&mut self) {
        Word::Verify.encode(&mut self.words);
        self.flush_words();
    }

    /// Bytes that are referred to.
    pub(super) fn referred(&self) -> u64 {
        self.referred
    }

    /// Plans the next slot, which lies at this position of the shared memory.
    pub(super) fn take(&mut self, view: &View, place: Range<u64>) -> Result<(), remora_fabric::memory::Error> {
        let slot = Slot { view, offset: place.start, bytes: self.seen..self.seen + (place.end - place.start) };
        while self.seen < slot.bytes.end {
            if !self.value.is_empty() {
                self.refer(&slot);
            } else if self.scanner.is_some() {
                self.look(&slot)?;
            } else {
                self.seen = slot.bytes.end;
                self.settle(self.seen.saturating_sub(TAIL_BYTES as u64));
            }
        }
        self.flush_words();
        self.hold(&slot)
    }

    /// The next bytes are those of a value.
    fn refer(&mut self, slot: &Slot<'_>) {
        let length = self.value.end.min(slot.bytes.end) - self.seen;
        let offset = slot.place(self.seen);
        match &mut self.open {
            Some(open) => open.append(offset, length),
            // A slot has at most 64 MiB, so that its length fits.
            None => Word::Piece { offset, length: length as u32 }.encode(&mut self.words),
        }
        if let Some(scanner) = &mut self.scanner {
            scanner.skip(length);
        }
        self.seen += length;
        self.planned = self.seen;
        self.value.start = self.seen;
        self.referred += length;
        if self.value.is_empty() {
            self.close();
        }
        if self.words.len() >= FIELD_BYTES {
            self.flush_words();
        }
        self.judge_once();
    }

    /// Scans or skips the next bytes.
    fn look(&mut self, slot: &Slot<'_>) -> Result<(), remora_fabric::memory::Error> {
        let Some(scanner) = &mut self.scanner else { return Ok(()) };
        let skipped = scanner.skip(slot.bytes.end - self.seen);
        if skipped > 0 {
            self.seen += skipped;
            self.settle_all();
            return Ok(());
        }
        if self.end.is_some() {
            // Bytes follow the end mark. `finish` refuses such a snapshot.
            self.seen = slot.bytes.end;
            self.planned = self.seen;
            return Ok(());
        }
        let (begins, bytes) = &mut self.window;
        let ends = *begins + bytes.len() as u64;
        if !(*begins..ends).contains(&self.seen) {
            let next = match self.in_runs {
                true => LOOK_BYTES,
                false if self.seen == ends => 2 * bytes.len() as u64,
                false => 0,
            };
            let length = next.clamp(FIRST_LOOK_BYTES, LOOK_BYTES).min(slot.bytes.end - self.seen);
            *begins = self.seen;
            bytes.resize(length as usize, 0);
            slot.view.read(slot.place(self.seen), bytes)?;
        }
        let fresh = bytes.get((self.seen - *begins) as usize..).unwrap_or_default();
        match scanner.feed(fresh) {
            Ok((taken, found)) => {
                self.seen += taken as u64;
                let rest = (fresh.len() - taken) as u64;
                let is_run = matches!(found, Some(Found::Run(_)));
                // What was looked at was too short for the whole record of a small value.
                let cut_off = found.is_none() && (1..RUN_VALUES_BELOW).contains(&scanner.skippable());
                self.in_runs = self.abilities.runs && (is_run || cut_off);
                let (begins, bytes) = &mut self.window;
                if is_run && rest < CUT_OFF_BYTES && *begins + (bytes.len() as u64) < slot.bytes.end {
                    bytes.clear();
                }
                self.found(found, slot);
            }
            Err(error) => {
                // The server may know this type.
                tracing::info!(%error, "from here on the snapshot is passed on as it is");
                self.scanner = None;
            }
        }
        self.judge_once();
        Ok(())
    }

    fn found(&mut self, found: Option<Found>, slot: &Slot<'_>) {
        match found {
            Some(Found::Run(run)) => self.run(&run, slot),
            Some(Found::Text(text)) if self.refers_to(&text) => {
                self.settle(text.begins);
                self.drop_undecided();
                if let Some(word) = Word::text(&text) {
                    let mut bytes = Vec::new();
                    let held_back = text.value.end - text.value.start <= self.whole;
                    word.encode(if held_back { &mut bytes } else { &mut self.words });
                    self.open = held_back.then_some(Open { text: bytes, pieces: Vec::new() });
                }
                self.value = text.value;
            }
            Some(Found::End { at }) => {
                self.settle(at);
                self.drop_undecided();
                self.end = Some(at);
            }
            Some(Found::Text(_)) | None => self.settle_all(),
        }
    }

    /// Refers to the records of a run. A run that is not wholly in this slot, which begins with the rest of a record,
    /// or in a database without a number for words, is passed on.
    fn run(&mut self, run: &Run, slot: &Slot<'_>) {
        let length = run.bytes.end - run.bytes.start;
        let (database, bytes) = (u32::try_from(run.database), u32::try_from(length));
        let (Ok(database), Ok(length), true) = (database, bytes, run.bytes.start >= slot.bytes.start) else {
            return self.settle_all();
        };
        self.settle(run.bytes.start);
        self.drop_undecided();
        Word::Run { database, offset: slot.place(run.bytes.start), length }.encode(&mut self.words);
        self.referred += u64::from(length);
        self.described += u64::from(length);
        if self.described >= DESCRIBED_BYTES || self.words.len() >= FIELD_BYTES {
            self.flush_words();
        }
    }

    fn refers_to(&self, text: &Text) -> bool {
        let idle = matches!(text.usage, Some(Usage::Idle(_)));
        Word::text(text).is_some() && (self.abilities.idle_times || !idle)
    }

    /// Drops the bytes that were scanned and not passed on.
    fn drop_undecided(&mut self) {
        self.held.clear();
        self.planned = self.seen;
    }

    /// Passes on all bytes that the scanner has decided about.
    fn settle_all(&mut self) {
        match (&self.scanner, self.end) {
            (_, Some(_)) => self.drop_undecided(),
            (Some(scanner), None) => self.settle(scanner.settled().min(self.seen)),
            (None, None) => {}
        }
    }

    /// Passes on all bytes below `position`: first the held ones, then the rest from the slots.
    fn settle(&mut self, position: u64) {
        if position <= self.planned {
            return;
        }
        self.flush_words();
        let count = self.held.len().min((position - self.planned) as usize);
        if count > 0 {
            let rest = self.held.split_off(count);
            let held = std::mem::replace(&mut self.held, rest);
            self.planned += count as u64;
            self.parts.push_back(Part::Bytes(held));
        }
        if self.fields == 0 && self.planned < MAGIC_BYTES && position >= MAGIC_BYTES {
            self.pass(MAGIC_BYTES);
            self.fields = 1;
            self.parts.push_back(Part::Bytes(std::mem::take(&mut self.greeting)));
        }
        self.pass(position);
    }

    fn pass(&mut self, position: u64) {
        let range = self.planned..position.max(self.planned);
        self.planned = range.end;
        match self.parts.back_mut() {
            Some(Part::Pass(last)) if last.end == range.start => last.end = range.end,
            _ if range.is_empty() => {}
            _ => self.parts.push_back(Part::Pass(range)),
        }
    }

    /// The slot may be gone when more comes: what is not decided is kept. No more than the beginning of a record, or
    /// the end.
    fn hold(&mut self, slot: &Slot<'_>) -> Result<(), remora_fabric::memory::Error> {
        let from = self.planned + self.held.len() as u64;
        if from < self.seen {
            let known = self.held.len();
            self.held.resize(known + (self.seen - from) as usize, 0);
            let fresh = self.held.get_mut(known..).unwrap_or_default();
            slot.view.read(slot.place(from), fresh)?;
        }
        Ok(())
    }

    /// The value is whole: its words go with the next field.
    fn close(&mut self) {
        let Some(Open { text, pieces }) = self.open.take() else { return };
        self.words.extend_from_slice(&text);
        for (offset, length) in pieces {
            // No longer than `whole`, which is a few slots.
            Word::Piece { offset, length: length as u32 }.encode(&mut self.words);
        }
    }

    fn flush_words(&mut self) {
        if !self.words.is_empty() {
            self.fields += 1;
            self.parts.push_back(Part::Bytes(field(&self.words)));
            self.words.clear();
            self.described = 0;
        }
    }

    fn judge_once(&mut self) {
        if self.judged || self.seen < TRIAL_BYTES || self.end.is_some() {
            return;
        }
        self.judged = true;
        if self.referred * 100 < self.seen * WORTH_PERCENT {
            tracing::info!(
                referred = self.referred,
                of = self.seen,
                "too few long strings to look for them any further"
            );
            self.scanner = None;
        }
    }

    /// All slots have been taken: the bytes of the end, if they ended where a snapshot ends. Without a checksum: the
    /// snapshot's is not that of what was sent.
    pub(super) fn finish(&self) -> Result<Vec<u8>, String> {
        let seen = self.seen;
        let tail = TAIL_BYTES as u64;
        let whole = match self.end {
            Some(end) => end + tail == seen,
            None => self.scanner.is_none() && self.held.len() == TAIL_BYTES && self.held.first() == Some(&OPCODE_EOF),
        };
        if !whole || self.fields == 0 {
            return Err(format!("the snapshot of {seen} bytes does not end as one (its end mark: {:?})", self.end));
        }
        let mut bytes = vec![0; TAIL_BYTES];
        bytes[0] = OPCODE_EOF;
        Ok(bytes)
    }
}

impl Open {
    fn append(&mut self, offset: u64, length: u64) {
        match self.pieces.last_mut() {
            Some((last, bytes)) if *last + *bytes == offset => *bytes += length,
            _ => self.pieces.push((offset, length)),
        }
    }
}

/// A slot while it is planned.
struct Slot<'v> {
    view: &'v View,
    /// Position of its first byte in the memory.
    offset: u64,
    /// Its positions.
    bytes: Range<u64>,
}

impl Slot<'_> {
    fn place(&self, position: u64) -> u64 {
        self.offset + (position - self.bytes.start)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use remora_fabric::{Memory, Pages};
    use remora_redis::rdb::{Content, Records, Value, Writer, reference::words};

    use super::*;

    const ONE_BY_ONE: Abilities = Abilities { idle_times: true, runs: false };

    /// A string that was referred to: database, key, value.
    type Told = (u32, Vec<u8>, Vec<u8>);

    /// The bytes of the link without fields, and the strings that the fields refer to.
    fn mix(snapshot: &[u8], slot_bytes: usize, abilities: Abilities) -> (Vec<u8>, Vec<Told>, ReferencePlan) {
        mix_whole(snapshot, slot_bytes, abilities, 0)
    }

    /// With values of at most `whole` bytes held back until they are whole.
    fn mix_whole(
        snapshot: &[u8],
        slot_bytes: usize,
        abilities: Abilities,
        whole: u64,
    ) -> (Vec<u8>, Vec<Told>, ReferencePlan) {
        let memory = Memory::create("test", snapshot.len() as u64, Pages::Small).unwrap();
        memory.write(0, snapshot).unwrap();
        let mut plan = ReferencePlan::new([1; TICKET_BYTES], abilities, whole);
        let (mut link, mut told) = (Vec::new(), Vec::new());
        let mut open: Option<(u32, Vec<u8>, u64, Vec<u8>)> = None;
        // For each slot, up to which field it is there; and fields so far.
        let (mut stays, mut fields) = (Vec::new(), 0);
        for slot in (0..snapshot.len()).step_by(slot_bytes) {
            let end = snapshot.len().min(slot + slot_bytes);
            plan.take(&memory, slot as u64..end as u64).unwrap();
            stays.push(plan.fields());
            while let Some(part) = plan.part() {
                let written = match part {
                    Part::Pass(range) => {
                        assert!(range.start >= slot as u64, "a slot that was given back is not passed on");
                        link.extend_from_slice(&snapshot[range.start as usize..range.end as usize]);
                        range.end - range.start
                    }
                    Part::Bytes(bytes) if bytes.first() == Some(&0xF7) => {
                        fields += 1;
                        for word in words(&bytes[1 + 9 + 3 + 9..bytes.len() - 1]) {
                            match word.unwrap() {
                                Word::Hello { .. } => assert_eq!(link.len(), 9),
                                Word::Run { database, offset, length } => {
                                    assert!(open.is_none() && abilities.runs);
                                    assert!(stays[offset as usize / slot_bytes] >= fields, "given back too early");
                                    let run = &snapshot[offset as usize..offset as usize + length as usize];
                                    let mut records = Records::new(run, RUN_VALUES_BELOW);
                                    for record in records.by_ref() {
                                        let (Content::Bytes(key), Value::String(Content::Bytes(value))) =
                                            (record.key, record.value)
                                        else {
                                            panic!("what this test does not write");
                                        };
                                        told.push((database, key.to_vec(), value.to_vec()));
                                    }
                                    assert_eq!(records.taken(), run.len());
                                }
                                Word::Verify => panic!("this module does not want it"),
                                Word::Text { database, key, length, .. } => {
                                    assert!(open.is_none());
                                    open = Some((database, key.to_vec(), length, Vec::new()));
                                }
                                Word::Piece { offset, length: bytes } => {
                                    let (database, key, length, mut value) = open.take().unwrap();
                                    assert!(length > whole || u64::from(bytes) == length, "held back, in one piece");
                                    assert!(stays[offset as usize / slot_bytes] >= fields, "given back too early");
                                    value.extend_from_slice(
                                        &snapshot[offset as usize..offset as usize + bytes as usize],
                                    );
                                    if value.len() as u64 == length {
                                        told.push((database, key, value));
                                    } else {
                                        open = Some((database, key, length, value));
                                    }
                                }
                            }
                        }
                        bytes.len() as u64
                    }
                    Part::Bytes(bytes) => {
                        link.extend_from_slice(bytes);
                        bytes.len() as u64
                    }
                };
                plan.wrote(written as usize);
            }
            assert_eq!(plan.passes_from(), end as u64);
        }
        assert!(open.is_none());
        (link, told, plan)
    }

    /// Every string in a snapshot.
    fn strings(snapshot: &[u8]) -> BTreeMap<(u32, Vec<u8>), Vec<u8>> {
        let (mut scanner, mut all, mut at) = (Scanner::new(0), BTreeMap::new(), 0);
        loop {
            let (taken, found) = scanner.feed(&snapshot[at..]).unwrap();
            at += taken;
            match found {
                Some(Found::Text(text)) => {
                    let value = snapshot[text.value.start as usize..text.value.end as usize].to_vec();
                    all.insert((text.database as u32, text.key), value);
                }
                Some(Found::Run(run)) => panic!("not asked for: {run:?}"),
                Some(Found::End { .. }) => return all,
                None => {}
            }
        }
    }

    fn snapshot(strings: &[(Vec<u8>, usize, bool)]) -> Vec<u8> {
        let mut writer = Writer::new(11);
        writer.aux("some", "field");
        for (number, (key, length, other)) in strings.iter().enumerate() {
            let value: Vec<u8> = (0..*length).map(|byte| (byte + number) as u8).collect();
            writer.select_db(u32::from(*other)).string(key, value, other.then_some(77));
        }
        writer.finish()
    }

    proptest! {
        #[test]
        fn a_server_gets_every_string_whatever_the_slots(
            drawn in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..40), 0_usize..3000, any::<bool>()), 0..30),
            slot_bytes in 30_usize..5000,
            held_back in 0_u64..4000,
            runs in any::<bool>(),
        ) {
            let whole = snapshot(&drawn);
            let (mut link, told, plan) = mix_whole(&whole, slot_bytes, Abilities { runs, ..ONE_BY_ONE }, held_back);
            link.extend(plan.finish().unwrap());
            let mut loaded = strings(&link);
            if runs {
                // On the link are those that lie across a border of two slots, or at the end of what is scanned at a
                // time: the smallest of that is 256 bytes.
                prop_assert!(loaded.len() <= whole.len() / slot_bytes.min(256) + 1);
            } else {
                prop_assert_eq!(plan.referred(), told.iter().map(|(_, _, value)| value.len() as u64).sum::<u64>());
                let long = |length: usize| length as u64 >= REFER_FROM_BYTES;
                prop_assert_eq!(told.len(), drawn.iter().filter(|(_, length, _)| long(*length)).count());
                prop_assert!(loaded.values().all(|value| !long(value.len())));
            }
            // Both may hold one key, the later of which stands; drawn keys seldom do.
            let doubles = told.iter().any(|(database, key, _)| loaded.contains_key(&(*database, key.clone())));
            prop_assume!(!doubles);
            loaded.extend(told.into_iter().map(|(database, key, value)| ((database, key), value)));
            prop_assert_eq!(loaded, strings(&whole));
        }

        #[test]
        fn any_bytes_go_through(bytes in proptest::collection::vec(any::<u8>(), 0..3000), slot_bytes in 30_usize..2000) {
            let whole = [b"REDIS0011", &bytes[..]].concat();
            let memory = Memory::create("test", whole.len() as u64, Pages::Small).unwrap();
            memory.write(0, &whole).unwrap();
            let mut plan = ReferencePlan::new([1; TICKET_BYTES], ONE_BY_ONE, 2000);
            for slot in (0..whole.len()).step_by(slot_bytes) {
                plan.take(&memory, slot as u64..whole.len().min(slot + slot_bytes) as u64).unwrap();
            }
            let _ = plan.finish();
        }
    }

    #[test]
    fn strings_that_are_longer_than_the_first_look_are_in_runs_too() {
        for length in [100, 300, 1024, 4000] {
            let drawn: Vec<_> = (0..200_u32).map(|key| (key.to_le_bytes().to_vec(), length, false)).collect();
            let (link, told, _) = mix(&snapshot(&drawn), 150_000, Abilities { runs: true, ..ONE_BY_ONE });
            let by_link = strings(&[&link[..], &[OPCODE_EOF], &[0; TAIL_BYTES - 1]].concat()).len();
            assert_eq!(told.len() + by_link, 200);
            // The first of the snapshot, and those across the borders of slots.
            assert!(by_link <= 3 + 200 * length / 150_000, "{length}: {by_link}");
        }
    }

    #[test]
    fn what_is_not_known_is_passed_on_to_the_last_byte() {
        let mut whole = snapshot(&[(b"long".to_vec(), 2000, false)]);
        whole.truncate(whole.len() - TAIL_BYTES);
        whole.extend([0x06; 5000]); // a type that was never released
        whole.extend([0xFF, 1, 2, 3, 4, 5, 6, 7, 8]);
        for slot_bytes in [40, 1000, 100_000] {
            let (link, told, plan) = mix(&whole, slot_bytes, ONE_BY_ONE);
            assert_eq!(told.len(), 1);
            assert!(link.ends_with(&[0x06; 5000]), "{}", link.len());
            assert_eq!(plan.finish().unwrap(), [0xFF, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn a_snapshot_that_is_cut_off_or_goes_on_has_no_end() {
        let whole = snapshot(&[(b"long".to_vec(), 2000, false)]);
        for broken in [&whole[..whole.len() - 1], &whole[..1000], &[&whole[..], b"x"].concat()] {
            assert!(mix_without_the_end(broken).finish().is_err());
        }
    }

    fn mix_without_the_end(bytes: &[u8]) -> ReferencePlan {
        let memory = Memory::create("test", bytes.len() as u64, Pages::Small).unwrap();
        memory.write(0, bytes).unwrap();
        let mut plan = ReferencePlan::new([1; TICKET_BYTES], ONE_BY_ONE, 2000);
        plan.take(&memory, 0..bytes.len() as u64).unwrap();
        plan
    }

    #[test]
    fn strings_with_idle_times_go_by_the_link_where_the_server_could_not_keep_them() {
        let mut bytes = b"REDIS0011\xF8\x07\x00\x01k\x44\x00".to_vec();
        bytes.extend([b'v'; 1024]);
        bytes.extend([0xFF, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(mix(&bytes, 300, ONE_BY_ONE).1.len(), 1);
        let (link, told, _) = mix(&bytes, 300, Abilities { idle_times: false, ..ONE_BY_ONE });
        assert_eq!((link.len(), told.len()), (bytes.len() - TAIL_BYTES, 0));
    }
}
