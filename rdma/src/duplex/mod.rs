//! Two-sided RDMA: connections on which both ends send. What is sent, how much may be in flight, and which memory
//! receives it is decided by the caller, the messenger. Tables are not read this way, but one-sidedly.
//!
//! ```text
//!   Listener ─ next_call ▶ Request ── accept ──▶ Connection ◀── call ── Devices
//!                                            │ one queue pair, one completion queue, one descriptor
//!                             SharedReceives │ one per DeviceContext, that is: per device and owner
//!                                  ▲         ▼
//!                                  └──── Region: registered memory
//! ```
//!
//! - A [`Connection`] has its own completion queue and event channel. Any one thread can serve it, and it can move to
//!   another thread. (Ceph's RDMA messenger has one queue for all connections and a thread that sorts completions, so
//!   that each message changes threads.)
//! - Receives are shared ([`DeviceContext::post_receive`]): a posted receive serves a message of any connection. A
//!   completion on one connection may therefore name a buffer that was posted for another.
//! - No call waits, except dropping a [`Connection`], which waits until the card has released its memory.

mod connection;
mod inline;
mod listener;
mod request;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

pub use connection::{Completion, Connection, Step};
pub use listener::Listener;
pub use request::Request;

use inline::Inline;

use crate::{
    cm::ConnectOptions,
    device::Device,
    objects::{Access, Domain, Registration, SharedReceives},
};
use remora_memory::Memory;

use crate::Error;

/// Options of connections. The limits of a card lower the numbers.
#[derive(Clone, Debug)]
pub struct DuplexOptions {
    /// Requests that may be posted on a connection and not completed. It need not match the number of buffers: a queue
    /// as deep as a pool of buffers would cost each connection the pool's size in queue entries.
    pub queue_depth: u32,
    /// Receives that may be posted per device.
    pub receives: u32,
    /// Maximum size of inline data, which needs no buffer and no fetch by the card. A card that allows less gets less;
    /// see [`Connection::inline_bytes`].
    pub inline_bytes: u32,
    /// READs in flight per connection, in each direction.
    pub reads_in_flight: u8,
    /// Retries of a message that finds no receive posted, 0 to 6. With credits there is always one, so that this only
    /// covers a faulty peer. 7 would mean unlimited.
    pub rnr_retries: u8,
    /// The card retransmits what is not acknowledged after 4.096 µs × 2^this, 8 to 24.
    pub ack_timeout: u8,
    /// Number of retransmissions, 1 to 6.
    pub retries: u8,
}

impl Default for DuplexOptions {
    fn default() -> DuplexOptions {
        let one_sided = ConnectOptions::default();
        DuplexOptions {
            queue_depth: 128,
            receives: 16_384,
            inline_bytes: 220,
            reads_in_flight: 4,
            rnr_retries: 3,
            ack_timeout: one_sided.ack_timeout,
            retries: one_sided.retries,
        }
    }
}

impl DuplexOptions {
    fn check(&self) -> Result<(), Error> {
        let fits = |fits: bool, sentence: &'static str| if fits { Ok(()) } else { Err(Error::Misuse(sentence)) };
        fits((4..=16_384).contains(&self.queue_depth), "queue depth: choose 4 to 16384 requests")?;
        fits((8..=1 << 20).contains(&self.receives), "receives: choose 8 to 1048576")?;
        fits(self.inline_bytes <= 1024, "inline bytes: choose at most 1024")?;
        fits((1..=16).contains(&self.reads_in_flight), "READs in flight: choose 1 to 16")?;
        fits(self.rnr_retries <= 6, "retries where no receive is posted: choose 0 to 6")?;
        fits((8..=24).contains(&self.ack_timeout), "acknowledgement time-out: choose 8 to 24")?;
        fits((1..=6).contains(&self.retries), "retries: choose 1 to 6")
    }

    /// The part that the connection manager takes.
    fn connecting(&self) -> ConnectOptions {
        ConnectOptions { ack_timeout: self.ack_timeout, retries: self.retries, ..ConnectOptions::default() }
    }
}

/// The devices of one owner's connections, opened as needed.
pub struct Devices {
    options: DuplexOptions,
    known: Mutex<Vec<Arc<DeviceContext>>>,
}

impl Devices {
    /// # Errors
    /// [`Error::Misuse`] for a number out of its range.
    pub fn new(options: DuplexOptions) -> Result<Devices, Error> {
        options.check()?;
        Ok(Devices { options, known: Mutex::default() })
    }

    /// The options of connections.
    pub fn options(&self) -> &DuplexOptions {
        &self.options
    }

    fn on(&self, device: &Arc<Device>) -> Result<Arc<DeviceContext>, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(station) = known.iter().find(|station| Arc::ptr_eq(station.domain.device(), device)) {
            return Ok(station.clone());
        }
        let station = Arc::new(DeviceContext::new(device, &self.options)?);
        known.push(station.clone());
        Ok(station)
    }
}

/// One device of one owner: a protection domain, and the receives that its connections share.
pub struct DeviceContext {
    receives: Arc<SharedReceives>,
    domain: Arc<Domain>,
    inline: Inline,
}

impl DeviceContext {
    fn new(device: &Arc<Device>, options: &DuplexOptions) -> Result<DeviceContext, Error> {
        let domain = Domain::new(device)?;
        let receives = SharedReceives::new(&domain, options.receives)?;
        Ok(DeviceContext { receives, domain, inline: Inline::new(options.inline_bytes) })
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.domain.device().name()
    }

    /// Receives that may be posted at the same time.
    pub fn most_receives(&self) -> u32 {
        self.receives.room()
    }

    /// Registers all of `memory` with the device. If `exported`, the other ends of connections that [allow
    /// it](Connection::allow_reads) may read it, and it cannot be received into; otherwise this end receives into it
    /// and sends from it.
    ///
    /// # Errors
    /// [`Error::NoRdma`] if the locked-memory limit is too low; [`Error::System`].
    pub fn register(&self, memory: &Arc<Memory>, exported: bool) -> Result<Region, Error> {
        let access = if exported { Access::RemoteRead } else { Access::Landing };
        Registration::new(&self.domain, memory, access).map(Region)
    }

    /// Posts a receive for one message of any connection. The caller posts no more than
    /// [`DeviceContext::most_receives`], and does not use the bytes until the completion of that name.
    ///
    /// # Errors
    /// [`Error::Memory`] if the range is out of bounds; [`Error::System`].
    pub fn post_receive(&self, name: u64, region: &Region, offset: u64, length: u32) -> Result<(), Error> {
        region.check(offset, length)?;
        self.receives.post(name, &region.0, offset, length)
    }
}

/// Registered memory. Dropping it removes the registration; requests that still name it fail.
#[derive(Clone)]
pub struct Region(Arc<Registration>);

impl Region {
    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.0.memory()
    }

    /// What the other end names to read it: the key, and the address of its first byte.
    pub fn remote(&self) -> (u32, u64) {
        (self.0.remote_key(), self.0.remote_base())
    }

    fn check(&self, offset: u64, length: u32) -> Result<(), Error> {
        Ok(remora_memory::check(offset, length.into(), self.0.memory().length())?)
    }
}

/// A device's descriptor, readable when it has asynchronous events; see [`Connection::look`].
fn watched(device: &Device) -> std::os::fd::BorrowedFd<'_> {
    device.as_fd()
}
