//! Notify: the kernel is told what has changed without it, and asks again.
//!
//! For file systems that others change too. Not to be called while a request about the same inode waits for its
//! answer in the same thread: the kernel may wait for that answer first.

use std::sync::Arc;

use rustix::io::Errno;

use crate::abi::{Put, notify};
use crate::device::Channel;

/// Tells the kernel what has changed. Can be used from any thread. After the session the kernel
/// knows nothing.
#[derive(Clone)]
pub struct Notifier(Arc<Channel>);

impl Notifier {
    pub(crate) fn new(channel: Arc<Channel>) -> Notifier {
        Notifier(channel)
    }

    /// The inode has other attributes, and from `offset` on other content; with a `length` of 0 up to its end.
    /// Returns whether the kernel knew the inode.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn changed(&self, node: u64, offset: u64, length: u64) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(24);
        body.put_u64(node).put_u64(offset).put_u64(length);
        self.tell(notify::INVAL_INODE, &body)
    }

    /// The inode has other attributes. Returns whether the kernel knew the inode.
    ///
    /// # Errors
    /// As for [`Notifier::changed`].
    pub fn changed_attributes(&self, node: u64) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(24);
        body.put_u64(node).put_u64(u64::MAX).put_u64(0);
        self.tell(notify::INVAL_INODE, &body)
    }

    /// The name in this directory means something else, or nothing. Returns whether the kernel knew the name.
    ///
    /// # Errors
    /// As for [`Notifier::changed`].
    pub fn renamed(&self, parent: u64, name: &[u8]) -> Result<bool, Errno> {
        let mut body = Vec::with_capacity(17 + name.len());
        body.put_u64(parent).put_u32(name.len() as u32).put_u32(0).put(name).put(&[0]);
        self.tell(notify::INVAL_ENTRY, &body)
    }

    fn tell(&self, code: i32, body: &[u8]) -> Result<bool, Errno> {
        match self.0.write(0, code, &[body]) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}
