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

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use remora_memory::Memory;

use crate::Error;
use crate::cm::ConnectOptions;
use crate::device::Device;
use crate::objects::{Access, Domain, Registration, SharedReceives};
pub use connection::{Completion, Connection, Listener, Request, Step};

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

// How many bytes of inline data a device allows. No device reports this in advance: it answers when a queue pair is
// made, or refuses to make one. So smaller sizes are tried until one succeeds, and the result is kept for later pairs.
// Pure.

/// The size that a device is known to allow.
struct Inline(AtomicU32);

impl Inline {
    /// Starts with the wanted size.
    fn new(wanted: u32) -> Inline {
        Inline(AtomicU32::new(wanted))
    }

    /// Calls `make` with a size until it succeeds, and returns its result and the allowed size. `make` returns the size
    /// that the device reports.
    ///
    /// # Errors
    /// The first refusal, if `make` fails without inline data too; any error that does not concern the size.
    fn settle<T>(&self, device: &str, mut make: impl FnMut(u32) -> Result<(T, u32), Error>) -> Result<(T, u32), Error> {
        let known = self.0.load(Ordering::Relaxed);
        let (mut asked, mut first) = (known, None);
        loop {
            match make(asked) {
                // Some devices round up. More than the wanted size is not used.
                Ok((made, answered)) => {
                    let allowed = answered.min(known);
                    if self.0.fetch_min(allowed, Ordering::Relaxed) > allowed {
                        let text = "an RDMA device allows less inline data than was asked for";
                        tracing::info!(device, asked = known, allowed, "{text}");
                    }
                    return Ok((made, allowed));
                }
                Err(error) if asked > 0 && is_too_much(&error) => {
                    asked = lower(asked);
                    first.get_or_insert(error);
                }
                // The size was not the reason: report the first refusal.
                Err(error) => return Err(first.filter(|_| is_too_much(&error)).unwrap_or(error)),
            }
        }
    }
}

/// The error that devices return for too much inline data, and for some other reasons.
fn is_too_much(error: &Error) -> bool {
    matches!(error, Error::System { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
}

fn lower(asked: u32) -> u32 {
    if asked > LEAST_BYTES { (asked / 2).max(LEAST_BYTES) } else { 0 }
}

/// Below this size, 0 is tried next: few messages are shorter.
const LEAST_BYTES: u32 = 32;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn refused(code: i32) -> Error {
        Error::System { what: "creating a queue pair", source: io::Error::from_raw_os_error(code) }
    }

    proptest! {
        #[test]
        fn a_card_that_refuses_too_much_gets_as_much_as_it_takes_and_is_asked_once_by_those_who_follow(
            wanted in 0u32..1025,
            most in 0u32..1025,
            rounds_to in prop::sample::select(vec![1u32, 16, 64]),
        ) {
            let inline = Inline::new(wanted);
            let mut calls = 0;
            let mut card = |asked: u32| {
                calls += 1;
                if asked > most { Err(refused(libc::EINVAL)) } else { Ok(((), asked.next_multiple_of(rounds_to).min(most))) }
            };
            let (_, allowed) = inline.settle("card", &mut card).unwrap();
            prop_assert!(allowed <= wanted.min(most));
            prop_assert!(2 * allowed + 1 >= wanted.min(most) || most < LEAST_BYTES);
            let again = inline.settle("card", &mut card).unwrap();
            prop_assert_eq!(again.1, allowed);
            prop_assert!(calls <= 8);
        }
    }

    #[test]
    fn a_card_that_answers_with_less_is_believed() {
        let inline = Inline::new(220);
        assert_eq!(inline.settle("card", |asked| Ok((asked, 64))).unwrap(), (220, 64));
        assert_eq!(inline.settle("card", |asked| Ok((asked, asked))).unwrap(), (64, 64));
    }

    #[test]
    fn what_fails_for_another_reason_fails_with_it_and_nothing_is_remembered() {
        let inline = Inline::new(220);
        let mut asked = Vec::new();
        let always = inline.settle::<()>("card", |bytes| {
            asked.push(bytes);
            Err(refused(libc::EINVAL))
        });
        assert!(always.unwrap_err().to_string().contains("creating a queue pair"));
        assert_eq!(asked, [220, 110, 55, 32, 0]);
        assert!(inline.settle::<()>("card", |_| Err(refused(libc::ENOMEM))).is_err());
        assert_eq!(inline.settle("card", |bytes| Ok(((), bytes))).unwrap().1, 220);
    }
}
