//! Two-sided RDMA: connections whose ends both send. Nothing is decided here about what is sent, how much may be under way, or whose
//! memory it lands in; that is the messenger's. Nor is anything of this on the path of the tables, which are read one-sidedly.
//!
//! ```text
//!   Listener ─ next_call ▶ Request ── accept ──▶ Connection ◀── call ── Devices
//!                                            │ one queue pair, one completion queue, one descriptor
//!                             SharedReceives │ one per DeviceContext, that is: per device and owner
//!                                  ▲         ▼
//!                                  └──── Region: registered memory
//! ```
//!
//! - A [`Connection`] has a completion queue and an event channel of its own, so that it can be served by any one thread, and move to
//!   another, without a word to anybody. (Ceph's RDMA messenger has one queue for all connections and a thread that sorts what comes;
//!   each message then changes threads.)
//! - Receives are shared ([`DeviceContext::post_receive`]): what is posted serves whichever connection a message comes by. So a connection's completion
//!   may name a buffer that was posted on behalf of another.
//! - Every wait is the caller's: no call here waits, but [`Drop`] of a connection, for as long as the card needs to let go of it.

mod connection;
mod inline;
mod listener;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

pub use connection::{Completion, Connection, Step};
pub use listener::{Listener, Request};

use inline::Inline;

use crate::{
    cm::ConnectOptions,
    device::Device,
    objects::{Access, Domain, Registration, SharedReceives},
};
use remora_memory::Memory;

use crate::Error;

/// How wires are made. Limits of a card lower the numbers.
#[derive(Clone, Debug)]
pub struct DuplexOptions {
    /// Requests that may be posted on a connection and not completed. Not tied to how many buffers there are: a queue that is as deep as a
    /// pool of buffers costs each connection the pool's size in queue entries.
    pub queue_depth: u32,
    /// Receives that may be posted per device.
    pub receives: u32,
    /// Bytes that a request may carry in itself: no buffer, and no fetch by the card. A card that allows fewer gets fewer; see
    /// [`Connection::inline_bytes`].
    pub inline_bytes: u32,
    /// READs in flight per connection, in each direction.
    pub reads_in_flight: u8,
    /// How often a message is sent again that found no receive posted, 0 to 6. With credits it never is, so that this only mends what a
    /// broken peer does; 7 would be for ever.
    pub rnr_retries: u8,
    /// 4.096 µs × 2^this until what is not acknowledged is sent again, 8 to 24.
    pub ack_timeout: u8,
    /// ... so many times, 1 to 6.
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

    /// As the connection manager's half wants them.
    fn connecting(&self) -> ConnectOptions {
        ConnectOptions { ack_timeout: self.ack_timeout, retries: self.retries, ..ConnectOptions::default() }
    }
}

/// The devices that an owner's wires are on, found as they are needed.
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

    /// How wires are made.
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

/// One device, for one owner: a protection domain, and the receives that all its wires share.
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

    /// Receives that may be posted at once.
    pub fn most_receives(&self) -> u32 {
        self.receives.room()
    }

    /// Tells the device of memory, all of it. `lent`: the other ends of wires that [allow it](Connection::allow_reads) may read it, and
    /// nothing may be received into it; otherwise only we receive into it and send from it.
    ///
    /// # Errors
    /// [`Error::NoRdma`] for a locked-memory limit that is too low; [`Error::System`].
    pub fn register(&self, memory: &Arc<Memory>, exported: bool) -> Result<Region, Error> {
        let access = if exported { Access::RemoteRead } else { Access::Landing };
        Registration::new(&self.domain, memory, access).map(Region)
    }

    /// Posts room for one message, for whichever connection it comes by. The caller has seen to it that no more are posted than
    /// [`DeviceContext::most_receives`], and lets the bytes be until the completion of that name.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::System`].
    pub fn post_receive(&self, name: u64, region: &Region, offset: u64, length: u32) -> Result<(), Error> {
        region.check(offset, length)?;
        self.receives.post(name, &region.0, offset, length)
    }
}

/// Memory that a device knows. Dropping it makes the device forget it; requests that still name it fail.
#[derive(Clone)]
pub struct Region(Arc<Registration>);

impl Region {
    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.0.memory()
    }

    /// What another end has to name to read it: the key, and the address of its first byte.
    pub fn remote(&self) -> (u32, u64) {
        (self.0.remote_key(), self.0.remote_base())
    }

    fn check(&self, offset: u64, length: u32) -> Result<(), Error> {
        Ok(remora_memory::check(offset, length.into(), self.0.memory().length())?)
    }
}

/// Readable when a device has something to say; see [`Connection::look`].
fn watched(device: &Device) -> std::os::fd::BorrowedFd<'_> {
    device.as_fd()
}
