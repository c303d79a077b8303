//! The kernel's setting that allows FUSE over io_uring. It is off unless an administrator switches it on.

use std::fs;
use std::io;
use std::sync::{Mutex, PoisonError};

/// FUSE over io_uring is allowed on this machine. When the last of these values is dropped, the setting is as
/// before.
#[derive(Debug)]
pub struct RingAllowed(());

/// Values of this process, and the setting before the first.
static ALLOWED: Mutex<(usize, String)> = Mutex::new((0, String::new()));

const SETTING: &str = "/sys/module/fuse/parameters/enable_uring";

/// 2: io_uring is forbidden to all processes.
const FORBIDDEN: &str = "/proc/sys/kernel/io_uring_disabled";

impl RingAllowed {
    /// Allows it.
    ///
    /// # Errors
    /// The kernel does not have it, or this process may not change the setting.
    pub fn new() -> io::Result<RingAllowed> {
        if fs::read_to_string(FORBIDDEN).is_ok_and(|value| value.trim() == "2") {
            return Err(io::Error::other(format!("{FORBIDDEN} is 2")));
        }
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{SETTING}: {error}"));
        let mut allowed = ALLOWED.lock().unwrap_or_else(PoisonError::into_inner);
        if allowed.0 == 0 {
            allowed.1 = fs::read_to_string(SETTING).map_err(named)?;
            fs::write(SETTING, "Y").map_err(named)?;
        }
        allowed.0 += 1;
        Ok(RingAllowed(()))
    }
}

impl Drop for RingAllowed {
    fn drop(&mut self) {
        let mut allowed = ALLOWED.lock().unwrap_or_else(PoisonError::into_inner);
        allowed.0 -= 1;
        if allowed.0 == 0 {
            let _ = fs::write(SETTING, allowed.1.trim());
        }
    }
}
