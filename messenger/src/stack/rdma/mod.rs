//! RDMA: messages by SEND, large pieces by READ, on reliable-connected queue pairs (InfiniBand, RoCE).
//!
//! ```text
//!   sender's memory                                                   receiver's memory
//!   ┌────────┐ small: in the request itself                           ┌──────────┐ shared receive queue:
//!   │ sends  │──── SEND: a letter of up to 8 KiB ────────────────────▶│ receives │ whatever comes for any link
//!   └────────┘     head: credits, words heard, offers read            └────┬─────┘
//!   ┌────────┐◀─── SEND: "bytes of the stream lie here" (an offer) ───▶    │ copied out, then posted again,
//!   │ lent   │═══════════════ READ, 256 KiB at a time ═══════════════▶┌────▼─────┐ and a credit given for it
//!   └────────┘     a right that the peer has from the first offer on  │ landing  │
//!                                                                     └──────────┘
//! ```
//!
//! - `letter`: the bytes; `flow`: the credits. Pure. **Start here.**
//! - `pool`: registered memory, bounded, growing and shrinking; `site`: one device with its pools and its shared receives;
//!   `graves`: how long what has ended lies before it is destroyed.
//! - `link`: one connection, as a worker sees it; `listener`: how one is called.
//!
//! What is true of it:
//!
//! - **Nobody is overrun.** A letter is sent only for a credit, a credit is given only for a receive that is posted. The card's own
//!   "receiver not ready" is left as a net below, with a bound, and never used.
//! - **Both ends say how much memory there is.** A sender that has spent its last credit says so, and the receiver posts more for it
//!   while the pool lasts; one that runs out asks links that sleep for the credits that they don't use. What comes back leaves the
//!   queue by itself, as receives cannot be called back from a card.
//! - **How deep a queue is has nothing to do with how many buffers there are**: the first is per link, the second per device.
//! - **A link can be served by any worker**: its completion queue, its channel and its descriptor are its own.
//! - **A dead queue pair is buried before its memory is used again**: it is told to fail, what it had taken out of the shared queue
//!   is counted back, and only then is it destroyed (`site`), by a worker's timer if nobody else comes by.
//! - Bytes are copied once into registered memory and once out of it: what an owner sends and where a message lands is ordinary
//!   memory, and registering it for each message would cost more than the copy of anything up to some 100 KiB.

mod flow;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod graves;
mod letter;
mod link;
mod listener;
mod pool;
mod site;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use remora_rdma::duplex::{Devices as Stations, DuplexOptions};

pub use link::RdmaLink;
pub use listener::RdmaListener;
pub(super) use site::Sites;

/// How RDMA links of a messenger work. Bytes of memory are locked, per device.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// The address that is called from: which device's port, where there are several. `None` leaves it to the system.
    pub local: Option<IpAddr>,
    /// Room for one letter, in bytes, 256 to 65536: what is received into, and the most that goes with one SEND.
    pub letter_bytes: u32,
    /// Letters that a peer may send on a new link before it hears from us, 1 to 4096.
    pub first_credits: u32,
    /// ... and on one that has asked for more.
    pub most_credits: u32,
    /// Memory for what is received, in bytes, at most.
    pub receive_bytes: u64,
    /// Memory for letters to be sent, in bytes, at most.
    pub send_bytes: u64,
    /// Memory for what peers read, and as much again for what we read, in bytes, at most.
    pub bulk_bytes: u64,
    /// Pieces from this size on are offered, and read by the peer; below it they go in letters.
    pub rendezvous_from_bytes: usize,
    /// Queue depth, inline bytes, retries.
    pub wires: DuplexOptions,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        RdmaOptions {
            local: None,
            // Two pages: a message of 4 KiB and its head in one letter.
            letter_bytes: 8 << 10,
            first_credits: 8,
            // 2 MiB under way: 160 µs of a 100 Gb/s link.
            most_credits: 256,
            receive_bytes: 128 << 20,
            send_bytes: 32 << 20,
            bulk_bytes: 32 << 20,
            // Eight letters: from there on the round trip of an offer costs less than their heads and completions.
            rendezvous_from_bytes: 64 << 10,
            wires: DuplexOptions::default(),
        }
    }
}

impl RdmaOptions {
    fn check(&self) -> io::Result<()> {
        let fits = |fits: bool, sentence: &'static str| {
            if fits { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, sentence)) }
        };
        fits((256..=65_536).contains(&self.letter_bytes), "RDMA letters: choose 256 to 65536 bytes")?;
        let shortest = letter::START_BYTES as u32;
        fits(self.wires.inline_bytes >= shortest, "inline bytes: choose at least 32, which words and offers take")?;
        let most = letter::MOST_CREDITS;
        fits((1..=most).contains(&self.first_credits), "first RDMA credits: choose 1 to 4096")?;
        fits((self.first_credits..=most).contains(&self.most_credits), "most RDMA credits: from the first to 4096")
    }
}

/// The RDMA half of a messenger.
pub(super) fn sites(options: &RdmaOptions) -> io::Result<Arc<Sites>> {
    options.check()?;
    let stations = Stations::new(options.wires.clone())?;
    Ok(Sites::new(options.clone(), Arc::new(stations)))
}
