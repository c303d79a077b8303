//! RDMA: messages by SEND, large pieces by READ, on reliable-connected queue pairs (InfiniBand, RoCE).
//!
//! ```text
//!   sender's memory                                                   receiver's memory
//!   ┌────────┐ small: in the request itself                           ┌──────────┐ shared receive queue:
//!   │ sends  │──── SEND: a message of up to 8 KiB ───────────────────▶│ receives │ messages of any link
//!   └────────┘     head: credits, acknowledgements, finished READs    └────┬─────┘
//!   ┌────────┐──── SEND: "bytes of the stream are here" (rendezvous) ─▶    │ copied out, then posted again,
//!   │exported│═══════════════ READ, 256 KiB at a time ═══════════════▶┌────▼─────┐ and a credit given for it
//!   └────────┘     allowed from the first rendezvous on               │ landing  │
//!                                                                     └──────────┘
//! ```
//!
//! - `message`: the bytes; `credits`: flow control, and what has arrived. Pure. **Start here.**
//! - `pool`: registered memory, bounded, growing and shrinking; `device`: one device with its pools, its shared
//!   receives, the requests on its queues, and the deferred destruction of queue pairs.
//! - `link`: a connection, as a worker sees it, and what it is yet to send; `listener`: accepts connections.
//!
//! Invariants:
//!
//! - **No receiver is overrun.** A message is sent only for a credit, and a credit is given only for a posted receive.
//!   The card's "receiver not ready" remains as a safety net, with a bound, and does not occur.
//! - **Credits follow the need.** A sender that spends its last credit says so, and the receiver posts more receives
//!   for it while the pool lasts. A receiver that runs out asks sleeping links to return unused credits. Returned
//!   receives leave the queue by use, as a posted receive cannot be withdrawn.
//! - **The depth of a queue does not depend on the number of buffers**: the first is per link, the second per device.
//! - **Any worker can serve a link**: its completion queue, its channel and its descriptor are its own.
//! - **A retired queue pair is destroyed before its memory is reused**: it is set to the error state, the receives that
//!   it took from the shared queue are counted back, and then it is destroyed (`device`), at the latest by a worker's
//!   timer.
//! - Bytes are copied once into registered memory and once out of it. Owners send from and receive into ordinary
//!   memory; registering it for each message would cost more than the copy, up to about 100 KiB.

mod credits;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod link;
mod message;
mod pool;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use remora_rdma::duplex::{Devices, DuplexOptions};

pub(super) use device::RdmaContext;
pub use link::{RdmaLink, RdmaListener};

/// Settings of a messenger's RDMA links. Memory is locked, and counted per device.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// The local address, which selects the device's port where there are several. `None`: the system chooses.
    pub local: Option<IpAddr>,
    /// Size of a message, in bytes, 256 to 65536: the receive buffers, and the most that one SEND carries.
    pub message_bytes: u32,
    /// Messages that a peer may send on a new link before the first credits arrive, 1 to 4096.
    pub initial_credits: u32,
    /// Greatest number of credits of a link that asks for more.
    pub max_credits: u32,
    /// Memory for received messages, in bytes, at most.
    pub receive_bytes: u64,
    /// Memory for messages to be sent, in bytes, at most.
    pub send_bytes: u64,
    /// Memory that peers read, in bytes, at most; and as much again for what this end reads.
    pub rendezvous_bytes: u64,
    /// Pieces of at least this size are read by the peer (rendezvous); smaller ones go in messages.
    pub rendezvous_from_bytes: usize,
    /// Queue depth, inline bytes, retries.
    pub wires: DuplexOptions,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        RdmaOptions {
            local: None,
            // Two pages: a message of 4 KiB and its head in one SEND.
            message_bytes: 8 << 10,
            initial_credits: 8,
            // 2 MiB under way: 160 µs of a 100 Gb/s link.
            max_credits: 256,
            receive_bytes: 128 << 20,
            send_bytes: 32 << 20,
            rendezvous_bytes: 32 << 20,
            // Eight messages: from there on the round trip of a rendezvous costs less than their heads and completions.
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
        fits((256..=65_536).contains(&self.message_bytes), "RDMA messages: choose 256 to 65536 bytes")?;
        let shortest = message::START_BYTES as u32;
        fits(
            self.wires.inline_bytes >= shortest,
            "RDMA inline bytes: choose at least 32, which control messages and rendezvous need",
        )?;
        let most = message::MAX_CREDITS;
        fits((1..=most).contains(&self.initial_credits), "initial RDMA credits: choose 1 to 4096")?;
        fits(
            (self.initial_credits..=most).contains(&self.max_credits),
            "greatest RDMA credits: choose the initial ones to 4096",
        )
    }
}

/// The RDMA part of a messenger.
pub(super) fn context(options: &RdmaOptions) -> io::Result<Arc<RdmaContext>> {
    options.check()?;
    let stations = Devices::new(options.wires.clone())?;
    Ok(RdmaContext::new(options.clone(), Arc::new(stations)))
}
