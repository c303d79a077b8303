//! RDMA devices that the connection manager has opened, and their asynchronous events.
//!
//! librdmacm opens a device once per process. It stays open even after it has failed or was removed, because the
//! objects on it must still be freed. A failed device gets no new objects; the one that replaces it is another device.
//! The asynchronous events of a device (a port goes down, an address changes, a queue pair fails) arrive on one
//! descriptor for all users. Any user that finds it readable calls [`Device::handle_events`], which triggers the
//! [`Alarm`]s of the users that an event concerns.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};

use crate::Error;
use crate::{
    bindings as ffi,
    library::{Library, check_code, library, set_nonblocking, text},
};

/// An open RDMA device.
pub struct Device {
    context: NonNull<ffi::ibv_context>,
    library: &'static Library,
    name: String,
    attributes: ffi::ibv_device_attr,
    failed: AtomicBool,
    #[cfg(feature = "testing")]
    events: Mutex<EventCounts>,
    /// By the name of the queue pair that each is for.
    alarms: Mutex<Vec<(usize, Weak<Alarm>)>>,
}

// SAFETY: An open device is not bound to a thread.
unsafe impl Send for Device {}
// SAFETY: The library locks where two threads use one device; our own fields never change, or are behind a mutex or
// atomic.
unsafe impl Sync for Device {}

impl Device {
    /// The device that the connection manager has opened as `context`.
    ///
    /// # Safety
    /// `context` is null, or was returned by librdmacm and is open.
    ///
    /// # Errors
    /// [`Error::Misuse`] for null; [`Error::System`].
    pub(crate) unsafe fn of(context: *mut ffi::ibv_context) -> Result<Arc<Device>, Error> {
        static KNOWN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let context = NonNull::new(context).ok_or(Error::Misuse("the connection manager has selected no device"))?;
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = known.iter().find(|device| device.context == context) {
            return Ok(device.clone());
        }
        let device = Arc::new(Device::open(context)?);
        keep_open(device.library);
        known.push(device.clone());
        Ok(device)
    }

    fn open(context: NonNull<ffi::ibv_context>) -> Result<Device, Error> {
        let library = library()?;
        // SAFETY: A struct of plain numbers, for which all zero bytes are valid.
        let mut attributes: ffi::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: The context is open. The attributes are a local variable.
        let asked = check_code(unsafe { (library.verbs.ibv_query_device)(context.as_ptr(), &mut attributes) });
        asked.map_err(Error::system("querying the limits of an RDMA device"))?;
        // SAFETY: The context is open, and its device does not change.
        let raw = unsafe { context.as_ref() }.device;
        // SAFETY: A device of an open context exists.
        let name = unsafe { (library.verbs.ibv_get_device_name)(raw) };
        // SAFETY: The name is a string of the device, which exists.
        let name = unsafe { text(name) };
        let device = Device {
            context,
            library,
            name,
            attributes,
            failed: AtomicBool::new(false),
            #[cfg(feature = "testing")]
            events: Mutex::default(),
            alarms: Mutex::default(),
        };
        set_nonblocking(device.as_fd())?;
        Ok(device)
    }

    /// All devices that the connection manager can use and that have not failed.
    ///
    /// # Errors
    /// [`Error::NoRdma`], with what is missing.
    pub fn all() -> Result<Vec<Arc<Device>>, Error> {
        let library = library()?;
        let mut count = 0;
        // SAFETY: The count is a local variable.
        let list = unsafe { (library.manager.rdma_get_devices)(&mut count) };
        let Some(list) = NonNull::new(list) else {
            return Err(crate::library::diagnose(&std::io::Error::last_os_error()));
        };
        let devices = (0..usize::try_from(count).unwrap_or(0))
            .map(|number| {
                // SAFETY: The list has `count` entries.
                let context = unsafe { list.add(number) };
                // SAFETY: An entry of the list, which the library has just written.
                let context = unsafe { context.read() };
                // SAFETY: A device that the connection manager has opened.
                unsafe { Device::of(context) }
            })
            .collect::<Result<Vec<_>, _>>();
        // SAFETY: The list came from rdma_get_devices. The contexts in it stay open.
        unsafe { (library.manager.rdma_free_devices)(list.as_ptr()) };
        let mut devices = devices?;
        devices.retain(|device| !device.has_failed());
        Ok(devices)
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn context(&self) -> *mut ffi::ibv_context {
        self.context.as_ptr()
    }

    /// The driver's functions for the data path.
    pub(crate) fn operations(&self) -> &ffi::ibv_context_ops {
        // SAFETY: The context is open as long as the process lives, and the driver does not change its table after
        // opening.
        &unsafe { self.context.as_ref() }.ops
    }

    /// The name as `rdma link` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has failed permanently or was removed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Records that it has failed, and triggers all alarms.
    pub fn mark_failed(&self) {
        if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!(
                device = self.name,
                "the RDMA device has failed or was removed: its connections have ended"
            );
        }
        self.trigger_alarms(|_| true);
    }

    /// As if it had been reset. Soft-RoCE has no devices that fail and come back.
    #[cfg(feature = "testing")]
    pub fn mark_working(&self) {
        self.failed.store(false, Ordering::Release);
    }

    /// Events reported so far.
    #[cfg(feature = "testing")]
    pub fn events(&self) -> EventCounts {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its limits.
    pub fn attributes(&self) -> &ffi::ibv_device_attr {
        &self.attributes
    }

    /// Whether it is an iWARP card, which makes connections itself.
    pub fn is_iwarp(&self) -> bool {
        // SAFETY: The context is open.
        let raw = unsafe { self.context.as_ref() }.device;
        // SAFETY: A device of an open context exists; its kind never changes.
        unsafe { (*raw).transport_type == ffi::IBV_TRANSPORT_IWARP }
    }

    /// Triggers `alarm` when an event ends the queue pair of this name, and when the device fails. With
    /// [`NO_QUEUE_PAIR`], only when the device fails.
    pub fn watch(&self, queue_pair: usize, alarm: &Arc<Alarm>) {
        let mut alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|(_, alarm)| alarm.strong_count() > 0);
        alarms.push((queue_pair, Arc::downgrade(alarm)));
    }

    /// Takes all pending events, logs them, and triggers the alarms that they concern. It never blocks.
    ///
    /// A port that goes down ends nothing by itself: the link may be back before the retries are used up, and otherwise
    /// they fail. The same holds for an address that changes.
    pub fn handle_events(&self) {
        // SAFETY: A number and a union of pointers and numbers: all zero bytes are valid.
        let mut event: ffi::ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: The context is open, its descriptor does not block, and the event is a local variable.
        while unsafe { (self.library.verbs.ibv_get_async_event)(self.context.as_ptr(), &mut event) } == 0 {
            let name = self.library.async_event_name(event.event_type);
            #[cfg(feature = "testing")]
            self.events.lock().unwrap_or_else(PoisonError::into_inner).count(event.event_type);
            match event.event_type {
                ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
                    // SAFETY: For these events the element is a queue pair. Only its address is used.
                    let queue_pair = unsafe { event.element.qp } as usize;
                    tracing::info!(device = self.name, "an RDMA queue pair has failed: {name}");
                    self.trigger_alarms(|of| of == queue_pair);
                }
                ffi::IBV_EVENT_DEVICE_FATAL => {
                    tracing::error!(device = self.name, "RDMA device event: {name}");
                    self.mark_failed();
                }
                ffi::IBV_EVENT_PORT_ERR => tracing::warn!(device = self.name, "an RDMA port went down: {name}"),
                ffi::IBV_EVENT_GID_CHANGE => {
                    tracing::warn!(device = self.name, "an address of an RDMA port has changed: {name}");
                }
                ffi::IBV_EVENT_COMM_EST | ffi::IBV_EVENT_QP_LAST_WQE_REACHED => {}
                _ => tracing::info!(device = self.name, "RDMA device event: {name}"),
            }
            // SAFETY: Each event that was taken is acknowledged once.
            unsafe { (self.library.verbs.ibv_ack_async_event)(&mut event) };
        }
    }

    fn trigger_alarms(&self, which: impl Fn(usize) -> bool) {
        let alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        let concerned = alarms.iter().filter(|(queue_pair, _)| which(*queue_pair));
        concerned.filter_map(|(_, alarm)| alarm.upgrade()).for_each(|alarm| alarm.trigger());
    }
}

/// Takes one more reference to each device, permanently. The library closes a removed device when the last reference is
/// returned (`remove_cma_dev` in librdmacm/cma.c), but this module keeps pointers to it. Called once per device that is
/// found.
fn keep_open(library: &Library) {
    let mut count = 0;
    // SAFETY: The count is a local variable. The list is leaked on purpose: freeing it would return the references.
    let list = unsafe { (library.manager.rdma_get_devices)(&mut count) };
    debug_assert!(!list.is_null(), "devices that were found can be listed");
}

/// Readable when there are asynchronous events.
impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The context is open as long as the process lives.
        let fd = unsafe { self.context.as_ref() }.async_fd;
        // SAFETY: The descriptor is open as long as the context.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// The name of no queue pair.
pub const NO_QUEUE_PAIR: usize = 0;

/// Number of events of each kind.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default)]
pub struct EventCounts {
    /// Times a port went down.
    pub ports_down: u32,
    /// Times an address of a port changed.
    pub addresses_changed: u32,
}

#[cfg(feature = "testing")]
impl EventCounts {
    fn count(&mut self, event: ffi::ibv_event_type) {
        match event {
            ffi::IBV_EVENT_PORT_ERR => self.ports_down += 1,
            ffi::IBV_EVENT_GID_CHANGE => self.addresses_changed += 1,
            _ => {}
        }
    }
}

/// Reports that a queue pair has ended, also to a thread that sleeps on its descriptor.
pub struct Alarm {
    fd: OwnedFd,
    triggered: AtomicBool,
}

impl Alarm {
    /// An alarm that has not been triggered.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new() -> Result<Arc<Alarm>, Error> {
        let fd =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        Ok(Arc::new(Alarm { fd, triggered: AtomicBool::new(false) }))
    }

    /// Triggers it, permanently.
    pub fn trigger(&self) {
        self.triggered.store(true, Ordering::Release);
        // Fails only if the counter is full, and then the descriptor is readable.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Whether it was triggered.
    pub fn is_triggered(&self) -> bool {
        self.triggered.load(Ordering::Acquire)
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
