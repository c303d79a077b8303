//! Completion queues, and the channels that announce completions.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use crate::{
    Error, bindings as ffi,
    device::Device,
    library::{check_code, check_pointer, set_nonblocking, warn_on_failure},
};

/// A completion channel: its descriptor becomes readable when an armed completion queue gets a completion.
pub struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    /// A new channel, whose descriptor does not block.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(device: &Arc<Device>) -> Result<Arc<Channel>, Error> {
        // SAFETY: The context is open as long as the process lives.
        let raw = check_pointer(unsafe { (device.library().verbs.ibv_create_comp_channel)(device.context()) });
        let raw = raw.map_err(Error::system("creating a completion channel"))?;
        let channel = Channel { raw, device: device.clone() };
        set_nonblocking(channel.as_fd())?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Takes one event, if there is one, and returns the name of the queue it is for ([`Completions::name`]).
    pub fn next(&self) -> Option<usize> {
        let verbs = &self.device.library().verbs;
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: Both pointers are to local variables. The channel's descriptor does not block.
        if unsafe { (verbs.ibv_get_cq_event)(self.raw.as_ptr(), &mut queue, &mut context) } != 0 {
            return None;
        }
        // SAFETY: The queue exists: destroying a queue waits until its events are acknowledged, and this acknowledges
        // one.
        unsafe { (verbs.ibv_ack_cq_events)(queue, 1) };
        Some(queue as usize)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The struct behind the pointer exists until `drop`.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: The descriptor is open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module.
        let code = unsafe { (self.device.library().verbs.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        warn_on_failure(code, "a completion channel");
    }
}

/// A completion queue.
pub struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: Arc<Channel>,
}

/// The result of a work request.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    /// The name of the request.
    pub name: u64,
    /// `IBV_WC_SUCCESS`, or the reason of the failure.
    pub status: ffi::ibv_wc_status,
    /// Bytes received, for a receive that succeeded.
    pub length: u32,
}

impl Completed {
    /// Reads an entry that a driver has written.
    fn read(entry: &MaybeUninit<ffi::ibv_wc>) -> Completed {
        let entry = entry.as_ptr();
        // SAFETY: The entry is aligned and borrowed. Drivers set `wr_id` in each entry that they report. No reference
        // is made to the other fields, which drivers may leave unchanged.
        let name = unsafe { (*entry).wr_id };
        // SAFETY: As above, for `status`.
        let status = unsafe { (*entry).status };
        let length = if status == ffi::IBV_WC_SUCCESS {
            // SAFETY: As above; `byte_len` is set in each entry that reports a success.
            unsafe { (*entry).byte_len }
        } else {
            0
        };
        Completed { name, status, length }
    }
}

impl Completions {
    /// A queue with room for `entries`. If it overflows, completions are lost and the queue fails. Owners therefore
    /// count their requests.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(channel: &Arc<Channel>, entries: u32) -> Result<Arc<Completions>, Error> {
        let (device, entries) = (channel.device(), i32::try_from(entries).unwrap_or(i32::MAX));
        // SAFETY: The context and the channel exist as long as this object, which holds them. 0 is the completion
        // vector that every device has.
        let raw = unsafe {
            (device.library().verbs.ibv_create_cq)(device.context(), entries, null_mut(), channel.raw.as_ptr(), 0)
        };
        let raw = check_pointer(raw).map_err(Error::system("creating a completion queue"))?;
        Ok(Arc::new(Completions { raw, channel: channel.clone() }))
    }

    /// The library's pointer, valid as long as this object.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// The identity of this queue in [`Channel::next`].
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// Makes the channel's descriptor readable at the next completion. Completions that are already in the queue do not
    /// count: poll once more after arming.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn arm(&self) -> Result<(), Error> {
        let ops = &self.channel.device().operations();
        let Some(arm) = ops.req_notify_cq else {
            return Err(Error::Misuse("the device does not announce completions"));
        };
        // SAFETY: The queue exists. 0 means any completion, not only solicited ones.
        check_code(unsafe { arm(self.raw.as_ptr(), 0) }).map_err(Error::system("arming a completion queue"))
    }

    /// Takes up to [`BATCH`] completions.
    ///
    /// # Errors
    /// [`Error::System`] if the queue has overflowed or the device is gone.
    pub fn poll(&self, into: &mut Vec<Completed>) -> Result<usize, Error> {
        let ops = &self.channel.device().operations();
        let Some(poll) = ops.poll_cq else { return Err(Error::Misuse("the device does not support polling")) };
        let mut entries = [const { MaybeUninit::<ffi::ibv_wc>::zeroed() }; BATCH];
        // SAFETY: The queue exists. There is room for BATCH entries, and the driver writes as many as it returns.
        let count = unsafe { poll(self.raw.as_ptr(), BATCH as i32, entries.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| {
            Error::system("polling a completion queue")(io::Error::other(
                "the queue has overflowed or the device is gone",
            ))
        })?;
        for entry in entries.iter().take(count) {
            into.push(Completed::read(entry));
        }
        Ok(count)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module. No queue pair uses the queue, and each event was acknowledged when
        // it was taken.
        let code = unsafe { (self.channel.device().library().verbs.ibv_destroy_cq)(self.raw.as_ptr()) };
        warn_on_failure(code, "a completion queue");
    }
}

/// Requests posted, and completions taken, by one call: enough to make the call cheap per request, few enough for the
/// stack.
pub const BATCH: usize = 16;

// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Channel {}
// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Channel {}
// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Completions {}
// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Completions {}
