//! Upstream: the server before this one in a chain. It permits to read its staging, into which it pulls the same
//! writes.
//!
//! ```text
//!   Open{Borrow}, Follow ──▶ Attached{keys}      once
//!   progress ≥ this write?                       read again after a pause, for up to WAIT_LIMIT
//!   blocks, at the same place                    one read; the caller checks them
//! ```
//!
//! A chain only saves bytes: if it fails, the blocks are pulled from their writer, and the chain is tried again later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::{Memory, Peer, ReadRequest};
use remora_messenger::Address;

use crate::caller::Caller;
use crate::lane::{Laid, Lane};
use crate::link::Security;
use crate::message::Holder;
use crate::outbox::{PROGRESS_AT, REACH_LIMIT, SEEN_AT};
use crate::reader::fetch;
use crate::shape::Shape;
use crate::version::Version;
use crate::wire::{Call, Mode, Reply};

/// See the module's text.
#[derive(Default)]
pub(super) struct Upstream {
    address: String,
    link: Option<Link>,
    /// After a failure it is not tried before.
    next_try: Option<Instant>,
}

/// A connection to it.
pub(super) struct Link {
    peer: Box<dyn Peer>,
    /// Keeps the grant.
    _caller: Caller,
}

impl Upstream {
    /// The connection to this server, made by `open` if there is none.
    pub(super) fn at(&mut self, address: &str, open: &dyn Fn() -> Result<Link, String>) -> Result<&mut Link, String> {
        if self.address != address {
            *self = Upstream { address: address.to_owned(), link: None, next_try: None };
        }
        if self.next_try.is_some_and(|at| Instant::now() < at) {
            return Err("it failed a moment ago".into());
        }
        if self.link.is_none() {
            self.next_try = Some(Instant::now() + PAUSE); // unless it can be opened
            self.link = Some(open()?);
            self.next_try = None;
        }
        self.link.as_mut().ok_or_else(|| "there is no connection".to_owned())
    }

    /// It could not be pulled from.
    pub(super) fn failed(&mut self) {
        (self.link, self.next_try) = (None, Some(Instant::now() + PAUSE));
    }
}

impl Link {
    /// Connects to the staging of a server. Reads arrive in `staging`.
    pub(super) fn open(
        (shape, holder): (Shape, Holder),
        address: &str,
        security: &Security,
        lane: &Lane<'_>,
        (staging, goes_on): (&Arc<Memory>, &dyn Fn() -> bool),
    ) -> Result<Link, String> {
        let address = address.parse::<Address>().map_err(|error| error.to_string())?;
        let caller = Caller::connect(&address, security)?;
        let ends = || if goes_on() { Ok(()) } else { Err("the writer has gone".to_owned()) };
        let open = Call::Open { shape, mode: Mode::Borrow, writer: holder.writer };
        match caller.ask(&open, REACH_LIMIT, ends)? {
            (Reply::Standing { .. }, _) => {}
            (reply, _) => return Err(unexpected(reply)),
        }
        match caller.ask(&Call::Follow(holder), REACH_LIMIT, ends)? {
            (Reply::Attached { session, keys }, _) => {
                let Laid { peer, transport, why, .. } = lane.connect(caller.connection(), (session, &keys), staging)?;
                tracing::info!(server = %address, %transport, why, "writes are pulled along a chain");
                Ok(Link { peer, _caller: caller })
            }
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// Reads the blocks of a write into the same place of this server's staging, once they are there.
    pub(super) fn fetch(
        &mut self,
        staging: &Memory,
        version: Version,
        (at, length): (u64, u32),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), String> {
        let (deadline, mut pause) = (Instant::now() + WAIT_LIMIT, FIRST_PAUSE);
        let mut read = |request| {
            let left = deadline.saturating_duration_since(Instant::now());
            fetch(&mut *self.peer, &[request], left, goes_on).map_err(|error| error.to_string())
        };
        loop {
            read(ReadRequest { tag: 0, offset: PROGRESS_AT, length: 8, sink_offset: SEEN_AT })?;
            let mut word = [0; 8];
            staging.read(SEEN_AT, &mut word).map_err(|error| error.to_string())?;
            if u64::from_le_bytes(word) >= version.word() {
                return read(ReadRequest { tag: 0, offset: at, length, sink_offset: at });
            }
            if Instant::now() >= deadline {
                return Err(format!("it does not have write {version} after {WAIT_LIMIT:?}"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

fn unexpected(reply: Reply) -> String {
    match reply {
        Reply::Refused { text, .. } => text,
        other => format!("an answer to another question: {other:?}"),
    }
}

/// Longest time in which a write must arrive along a chain, from when this server is ready for it. The longest write
/// takes 0.3 s over 100 Mbit/s, and a writer waits for several seconds.
const WAIT_LIMIT: Duration = Duration::from_secs(1);

/// Pauses between two looks at the progress: from a round trip to what is little beside the transfer of 1 MiB.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// How long a chain that has failed is not tried again. The writer leaves a dead server out meanwhile.
const PAUSE: Duration = Duration::from_secs(5);
