//! Shared memory. Not there yet: it refuses.
use super::{Link, Listener};
use std::io;
use std::path::Path;
/// Refuses.
pub struct ShmListener;
impl ShmListener {
    pub(super) fn bind(_: &Path) -> io::Result<Box<dyn Listener>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
/// Refuses.
pub struct ShmLink;
impl ShmLink {
    pub(super) fn call(_: &Path) -> io::Result<Box<dyn Link>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
