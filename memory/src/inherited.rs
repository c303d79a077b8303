//! Descriptors that the service manager left open for this process. The only unsafe code for them.

// Stands alone: it holds one of the crate's few unsafe blocks, and nothing else here is about service managers.

use std::{
    collections::VecDeque,
    env,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
};

/// A descriptor, and the name that the manager has for it.
pub struct Inherited {
    /// Its name; empty if the manager gave none.
    pub name: String,
    /// The descriptor. Programs that this process starts do not inherit it.
    pub descriptor: OwnedFd,
}

/// How many descriptors the service manager left open for this process.
pub fn passed() -> u32 {
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    // A process that this one's parent started for itself has the variables too, and not the descriptors.
    match number("LISTEN_PID") == Some(std::process::id()) {
        true => number("LISTEN_FDS").unwrap_or(0),
        false => 0,
    }
}

/// Takes the descriptors that the service manager left open for this process (`LISTEN_FDS`, as in sd_listen_fds(3)). It
/// gives them once: a second call returns none.
pub fn take() -> Vec<Inherited> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let count = passed().min(MAX) as RawFd;
    if count == 0 || TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names: VecDeque<&str> = names.split(':').collect();
    let name_of = |number| {
        let name = names.pop_front().unwrap_or_default().to_owned();
        Some(Inherited { name, descriptor: open(number)? })
    };
    (FIRST..FIRST + count).filter_map(name_of).collect()
}

/// The first descriptor behind standard input, output and error.
const FIRST: RawFd = 3;

/// More descriptors than any of our services asks for.
const MAX: u32 = 64;

/// The descriptor of this number; `None` if it is not open.
#[allow(unsafe_code)] // no crate gives these as descriptors with an owner
fn open(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: The call changes a flag of a descriptor and touches no memory. It fails if the number is not open.
    let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: The number is open, as the call above has shown. It has no other owner: the manager opened it before this
    // process began, as LISTEN_PID says, so no code here has opened it, and `TAKEN` lets only one caller get this far.
    (set == 0).then(|| unsafe { OwnedFd::from_raw_fd(number) })
}
