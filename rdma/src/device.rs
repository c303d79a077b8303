//! RDMA devices as the connection manager has opened them, and what they report of themselves. Who connects to whom is `cm`'s.
//!
//! A device is opened once per process, by librdmacm, and stays open, also when it has failed or was pulled out: what was made on it must
//! still be given back. It is *dead* then, and nothing is made on it any more; the one that comes in its place is another device. Its
//! asynchronous events (a port goes down, an address changes,
//! a queue pair dies) come by one descriptor for everybody: whoever sees it readable calls [`Device::attend`], which tells those whom
//! an event concerns by their [`Alarm`].

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

/// See the module's text.
pub struct Device {
    context: NonNull<ffi::ibv_context>,
    library: &'static Library,
    name: String,
    attributes: ffi::ibv_device_attr,
    dead: AtomicBool,
    #[cfg(feature = "testing")]
    events: Mutex<EventCounts>,
    /// By the name of the queue pair that it is for.
    alarms: Mutex<Vec<(usize, Weak<Alarm>)>>,
}

// SAFETY: An open device is not tied to a thread.
unsafe impl Send for Device {}
// SAFETY: The library takes its own locks where two threads use one device; what is ours is behind a mutex or never changes.
unsafe impl Sync for Device {}

impl Device {
    /// The device that the connection manager has opened as `context`.
    ///
    /// # Safety
    /// `context` is null, or was given by librdmacm and is open.
    ///
    /// # Errors
    /// [`Error::Misuse`] for null; [`Error::System`].
    pub(crate) unsafe fn of(context: *mut ffi::ibv_context) -> Result<Arc<Device>, Error> {
        static KNOWN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let context = NonNull::new(context).ok_or(Error::Misuse("the connection manager has chosen no device"))?;
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
        // SAFETY: The context is open, and the attributes are a place of ours.
        let asked = check_code(unsafe { (library.verbs.ibv_query_device)(context.as_ptr(), &mut attributes) });
        asked.map_err(Error::system("asking an RDMA device for its limits"))?;
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
            dead: AtomicBool::new(false),
            #[cfg(feature = "testing")]
            events: Mutex::default(),
            alarms: Mutex::default(),
        };
        set_nonblocking(device.as_fd())?;
        Ok(device)
    }

    /// All devices that the connection manager can use, without those that are known to have failed.
    ///
    /// # Errors
    /// [`Error::NoRdma`], with what is missing.
    pub fn all() -> Result<Vec<Arc<Device>>, Error> {
        let library = library()?;
        let mut count = 0;
        // SAFETY: The count is a place of ours.
        let list = unsafe { (library.manager.rdma_get_devices)(&mut count) };
        let Some(list) = NonNull::new(list) else {
            return Err(crate::missing::diagnose(&std::io::Error::last_os_error()));
        };
        let devices = (0..usize::try_from(count).unwrap_or(0))
            .map(|number| {
                // SAFETY: The list has `count` entries.
                let context = unsafe { list.add(number) };
                // SAFETY: An entry of the list, just now written by the library.
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

    /// The calls of the data path, which the driver provides.
    pub(crate) fn operations(&self) -> &ffi::ibv_context_ops {
        // SAFETY: The context is open for as long as the process lives, and the driver does not change its table once it is.
        &unsafe { self.context.as_ref() }.ops
    }

    /// The name as `rdma link` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has failed for good, or is gone.
    pub fn has_failed(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// It is: rings all alarms.
    pub fn mark_failed(&self) {
        if !self.dead.swap(true, Ordering::AcqRel) {
            tracing::error!(device = self.name, "the RDMA device has failed or is gone: its connections are over");
        }
        self.trigger_alarms(|_| true);
    }

    /// As if it had been reset: Soft-RoCE has no devices that fail and come back.
    #[cfg(feature = "testing")]
    pub fn mark_working(&self) {
        self.dead.store(false, Ordering::Release);
    }

    /// What it has reported so far.
    #[cfg(feature = "testing")]
    pub fn events(&self) -> EventCounts {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it can do, in numbers.
    pub fn attributes(&self) -> &ffi::ibv_device_attr {
        &self.attributes
    }

    /// Whether it speaks iWARP, whose connections are made by the card itself.
    pub fn is_iwarp(&self) -> bool {
        // SAFETY: The context is open.
        let raw = unsafe { self.context.as_ref() }.device;
        // SAFETY: A device of an open context exists; its kind never changes.
        unsafe { (*raw).transport_type == ffi::IBV_TRANSPORT_IWARP }
    }

    /// `alarm` rings when something ends the queue pair of that name, and when the device dies. [`NO_QUEUE_PAIR`]: only then.
    pub fn watch(&self, queue_pair: usize, alarm: &Arc<Alarm>) {
        let mut alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|(_, alarm)| alarm.strong_count() > 0);
        alarms.push((queue_pair, Arc::downgrade(alarm)));
    }

    /// Takes what events there are, logs them, and rings the alarms of those that they concern. Never blocks.
    ///
    /// A port that goes down ends nothing by itself: a cable may be back before the retries are over, and if it isn't they fail. The
    /// same holds for an address that changes.
    pub fn handle_events(&self) {
        // SAFETY: A number and a union of pointers and numbers: all zero bytes are valid.
        let mut event: ffi::ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: The context is open, its descriptor does not block, the event is a place of ours.
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
                    tracing::error!(device = self.name, "the RDMA device says: {name}");
                    self.mark_failed();
                }
                ffi::IBV_EVENT_PORT_ERR => tracing::warn!(device = self.name, "an RDMA port went down: {name}"),
                ffi::IBV_EVENT_GID_CHANGE => {
                    tracing::warn!(device = self.name, "an address of an RDMA port has changed: {name}");
                }
                ffi::IBV_EVENT_COMM_EST | ffi::IBV_EVENT_QP_LAST_WQE_REACHED => {}
                _ => tracing::info!(device = self.name, "the RDMA device says: {name}"),
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

/// Takes one reference more to each device that there is, for ever. The library closes a device that was pulled out when the last
/// reference is given back (`remove_cma_dev` of librdmacm/cma.c), and pointers to it are held here. Once per device that is met.
fn keep_open(library: &Library) {
    let mut count = 0;
    // SAFETY: The count is a place of ours. The list is leaked on purpose: freeing it would give the references back.
    let list = unsafe { (library.manager.rdma_get_devices)(&mut count) };
    debug_assert!(!list.is_null(), "devices that were met can be listed");
}

/// Readable when there are asynchronous events.
impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The context is open for as long as the process lives.
        let fd = unsafe { self.context.as_ref() }.async_fd;
        // SAFETY: ... and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// Where no queue pair lies.
pub const NO_QUEUE_PAIR: usize = 0;

/// How often which event came.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default)]
pub struct EventCounts {
    /// Times that a port went down.
    pub ports_down: u32,
    /// Times that an address of a port changed.
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

/// Says that a queue pair is at its end, also to a thread that sleeps on its descriptor.
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
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("making an eventfd"))?;
        Ok(Arc::new(Alarm { fd, triggered: AtomicBool::new(false) }))
    }

    /// Triggers it, for good.
    pub fn trigger(&self) {
        self.triggered.store(true, Ordering::Release);
        // Can't fail but for a counter that is full, and then it is readable.
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
